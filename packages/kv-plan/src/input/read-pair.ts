import { readFile } from "node:fs/promises";
import { basename, dirname } from "node:path";
import { type KvCacheKind, KvError } from "@kv/interface";
import { parsePythonJson } from "../model/config-fields.js";
import type { DraftModel } from "../model/draft-layers.js";
import { modelCaches } from "../model/model-caches.js";
import type { CliOptions } from "../options.js";
import type { RefusalReport } from "../report/report.js";
import { both } from "./engine-flags.js";
import { type ModelSource, modelByHand, modelOfConfig } from "./model-source.js";
import type { Pair } from "./pair.js";
import { pairFromFile } from "./pair-file.js";
import { kindOf, pairOrRefusal } from "./pair-from-model.js";

type PairInput = "--file" | "--config" | "--layers";

const MODELS: readonly PairInput[] = ["--config", "--layers"];

const SERVES_WITH: readonly (readonly [
  flag: string,
  option: keyof CliOptions,
  inputs: readonly PairInput[],
])[] = [
  ["--tp", "tp", MODELS],
  ["--pp", "pp", MODELS],
  ["--block-size", "blockSize", MODELS],
  ["--kernel-block-size", "kernelBlockSize", MODELS],
  ["--layout", "layout", MODELS],
  ["--backend", "backend", MODELS],
  ["--num-blocks", "numBlocks", MODELS],
  ["--kv-cache-dtype", "kvCacheDtype", MODELS],
  ["--ssm-dtype", "ssmDtype", ["--config"]],
  ["--no-prefix-caching", "prefixCaching", ["--config"]],
  ["--draft", "draft", ["--config"]],
  ["--kv-heads", "kvHeads", ["--layers"]],
  ["--head-size", "headSize", ["--layers"]],
  ["--mla", "mla", ["--layers"]],
];

function isGiven(option: keyof CliOptions, value: CliOptions[keyof CliOptions]): boolean {
  // vLLM's default is on; the flag turns it off.
  if (option === "prefixCaching") return value === false;
  return Array.isArray(value)
    ? value.length > 0
    : value !== undefined && value !== false && value !== "auto";
}

/** @throws `KV_CONFIG_INVALID` with the flags that have no effect with an input. */
function refuseUnused(options: CliOptions, input: PairInput): void {
  const unused = SERVES_WITH.filter(
    ([, option, inputs]) => isGiven(option, options[option]) && !inputs.includes(input),
  );
  if (unused.length > 0) {
    const serving = [...new Set(unused.flatMap(([, , inputs]) => inputs))];
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${unused.map(([flag]) => flag).join(", ")} has no effect with ${input}`,
      {
        hint: `${input} defines it already, or does not use it: leave the flag out, or give the pair with ${serving.join(" or ")}`,
      },
    );
  }
  if (input === "--layers" && options.mla && options.kvHeads !== undefined) {
    throw new KvError("KV_CONFIG_INVALID", "--kv-heads has no effect with --mla", {
      hint: "a latent vector has no heads: leave one of the two out",
    });
  }
}

/** Described pairs with hundreds of regions take less than a megabyte. */
const MAX_FILE_BYTES = 16 * 2 ** 20;

/**
 * An unknown model, or a TP size that vLLM refuses, gives a refusal.
 * @throws `KV_CONFIG_INVALID`, `KV_PLAN_*`.
 */
export async function readPair(options: CliOptions): Promise<Pair | RefusalReport> {
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
      { hint: "such as: kv-plan --config config.json --tp 8 --tp 4" },
    );
  }
  refuseUnused(options, input);
  if (options.file !== undefined) {
    return pairFromFile(options.file, await readJson(options.file));
  }
  const title = options.config.map(nameOf).join(" / ") || "model";
  const read = options.config.length === 0 ? [] : await configsOf(options);
  const draft = await draftOf(options);
  return pairOrRefusal(
    title,
    () => {
      const models = read.length === 0 ? flagged(options) : modelsOf(read, options, draft);
      refuseUnusedStateDtype(options, models);
      return models;
    },
    options,
  );
}

/** One config serves both engines. */
async function configsOf(options: CliOptions): Promise<{ name: string; config: unknown }[]> {
  if (options.config.length > 2) both("--config", options.config, "");
  const read: { name: string; config: unknown }[] = [];
  for (const file of options.config)
    read.push({ name: nameOf(file), config: await readJson(file) });
  return read;
}

/** @throws `KV_CONFIG_INVALID`; `KV_PLAN_UNSUPPORTED` for a draft beside pipeline stages. */
async function draftOf({ draft, draftTokens, pp }: CliOptions): Promise<DraftModel | undefined> {
  if (draft === undefined) return undefined;
  if (pp.some((stages) => stages > 1))
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      "--draft beside --pp: on which stages vLLM has a draft's layers is not known here",
      { hint: "leave one of the two out" },
    );
  return { tokens: draftTokens, ...(draft === "mtp" ? {} : { config: await readJson(draft) }) };
}

function modelsOf(
  read: readonly { readonly name: string; readonly config: unknown }[],
  options: CliOptions,
  draft: DraftModel | undefined,
): readonly [ModelSource, ModelSource] {
  const types = {
    draft,
    cacheDtype: options.kvCacheDtype,
    stateDtype: options.ssmDtype,
    prefixCaching: options.prefixCaching,
  };
  const [prefill, decode = prefill] = read.map(({ name, config }) =>
    modelOfConfig(name, config, types),
  );
  if (prefill === undefined || decode === undefined)
    throw new KvError("KV_INTERNAL", "no config was read");
  return [prefill, decode];
}

/** A config.json takes the name of its folder. */
export function nameOf(file: string): string {
  const name = basename(file);
  return name === "config.json" ? basename(dirname(file)) || name : name.replace(/\.json$/, "");
}

function flagged(options: CliOptions): readonly [ModelSource, ModelSource] {
  const { layers = 0, headSize, kvHeads, mla } = options;
  if (headSize === undefined || (kvHeads === undefined && !mla)) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `--layers needs --head-size${mla ? "" : " and --kv-heads"} too`,
    );
  }
  const model = modelByHand({
    layers,
    headSize,
    isMla: mla,
    kvHeads: kvHeads ?? 1,
    cacheDtype: options.kvCacheDtype,
  });
  return [model, model];
}

function refuseUnusedStateDtype({ ssmDtype }: CliOptions, models: readonly ModelSource[]): void {
  if (ssmDtype === "auto") return;
  if (models.some((model) => model.hasStates)) return;
  throw new KvError(
    "KV_CONFIG_INVALID",
    `--ssm-dtype ${ssmDtype} has no effect: no layer of the model has a state`,
    { hint: "leave it out; --kv-cache-dtype is the type of attention's cache" },
  );
}

/** @throws `KV_CONFIG_INVALID`. */
export async function readJson(file: string): Promise<unknown> {
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
    return parsePythonJson(text.toString("utf8"));
  } catch (error) {
    throw KvError.from(error, "KV_CONFIG_INVALID", `${file} is not JSON`);
  }
}

/** A model's KV cache groups, in vLLM's order. */
export interface ConfiguredGroups {
  /** The file that describes the groups. */
  readonly from: string;
  readonly kinds: readonly KvCacheKind[];
  /** Layer names of each group. */
  readonly layers: readonly (readonly string[])[];
}

/**
 * The groups that vLLM 0.33 makes of this `config.json` on one rank.
 * @throws `KV_CONFIG_INVALID` for an unreadable file or a wrong field; `KV_PLAN_UNSUPPORTED` for an
 * unknown architecture.
 */
export async function groupsOfConfig(file: string): Promise<ConfiguredGroups> {
  const { groups } = modelCaches(nameOf(file), await readJson(file), { tpSize: 1 });
  return {
    from: file,
    kinds: groups.map(kindOf),
    layers: groups.map(({ layers }) => layers.map(({ name }) => name)),
  };
}
