import { readFile } from "node:fs/promises";
import { basename, dirname } from "node:path";
import { KvError } from "@kv/interface";
import type { CliOptions } from "../options.js";
import { both } from "./engine-flags.js";
import { modelFromHfConfig } from "./hf-config.js";
import type { ModelShape } from "./model-shape.js";
import type { Pair } from "./pair.js";
import { pairFromFile } from "./pair-file.js";
import { pairOfModels } from "./pair-of-models.js";
import { type PairInput, refuseUnused } from "./unused-flags.js";

/** A config.json has some kilobytes, and a described pair of hundreds of regions less than a megabyte. */
const MAX_FILE_BYTES = 16 * 2 ** 20;

/** Reads the pair from the input that the flags name. `assumed` lists what no input says. Errors: `KV_CONFIG_INVALID`, `KV_PLAN_*`. */
export async function readPair(options: CliOptions): Promise<Pair> {
  const given: readonly (PairInput | undefined)[] = [
    options.file === undefined ? undefined : "--file",
    options.config.length > 0 ? "--config" : undefined,
    options.layers === undefined ? undefined : "--layers",
  ];
  const inputs = given.filter((flag) => flag !== undefined);
  const [input] = inputs;
  if (input === undefined || inputs.length > 1) {
    const found = inputs.length === 0 ? "none is given" : `${inputs.join(" and ")} are given`;
    throw new KvError(
      "KV_CONFIG_INVALID",
      `a pair comes from one of --file, --config or --layers: ${found}`,
      {
        hint: "such as: kv-plan --config config.json --tp 8 --tp 4",
      },
    );
  }
  refuseUnused(options, input);
  if (options.file !== undefined) {
    return pairFromFile(options.file, await readJson(options.file));
  }
  const models = options.config.length > 0 ? await configs(options) : flagged(options);
  refuseUnusedStateDtype(options, models);
  return pairOfModels(models, options);
}

async function configs(options: CliOptions): Promise<readonly [ModelShape, ModelShape]> {
  if (options.config.length > 2) both("--config", options.config, "");
  const models: ModelShape[] = [];
  for (const file of options.config) {
    models.push(
      modelFromHfConfig(nameOf(file), await readJson(file), {
        cache: options.kvCacheDtype,
        state: options.ssmDtype,
      }),
    );
  }
  const [prefill, decode = prefill] = models;
  if (prefill === undefined || decode === undefined) throw new KvError("KV_INTERNAL", "no config was read");
  return [prefill, decode];
}

/** The name of a model: that of the folder for a file named config.json. */
function nameOf(file: string): string {
  const name = basename(file);
  return name === "config.json" ? basename(dirname(file)) || name : name.replace(/\.json$/, "");
}

function flagged(options: CliOptions): readonly [ModelShape, ModelShape] {
  const { layers = 0, headSize, kvHeads, mla } = options;
  if (headSize === undefined || (kvHeads === undefined && !mla)) {
    throw new KvError("KV_CONFIG_INVALID", `--layers needs --head-size${mla ? "" : " and --kv-heads"} too`);
  }
  const dtype = options.kvCacheDtype === "auto" ? "bfloat16" : options.kvCacheDtype;
  const model = modelFromHfConfig(
    "model",
    mla
      ? { num_hidden_layers: layers, kv_lora_rank: headSize, dtype }
      : {
          num_hidden_layers: layers,
          num_attention_heads: kvHeads,
          num_key_value_heads: kvHeads,
          head_dim: headSize,
          dtype,
        },
  );
  return options.kvCacheDtype === "auto"
    ? [{ ...model, assumed: ["dtype bfloat16"] }, model]
    : [model, model];
}

/** Refuses `--ssm-dtype` for a model without states. */
function refuseUnusedStateDtype({ ssmDtype }: CliOptions, models: readonly ModelShape[]): void {
  if (ssmDtype === "auto") return;
  if (models.some(({ layers }) => layers.some(({ state }) => state !== undefined))) return;
  throw new KvError(
    "KV_CONFIG_INVALID",
    `--ssm-dtype ${ssmDtype} has no effect: no layer of the model has a state`,
    {
      hint: "leave it out; --kv-cache-dtype is the type of attention's cache",
    },
  );
}

async function readJson(file: string): Promise<unknown> {
  let text: Buffer;
  try {
    text = await readFile(file);
  } catch (error) {
    throw KvError.from(error, "KV_CONFIG_INVALID", `${file} cannot be read`);
  }
  if (text.byteLength > MAX_FILE_BYTES) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${file} has ${text.byteLength} bytes, more than ${MAX_FILE_BYTES}`,
    );
  }
  try {
    return JSON.parse(text.toString("utf8")) as unknown;
  } catch (error) {
    throw KvError.from(error, "KV_CONFIG_INVALID", `${file} is not JSON`);
  }
}
