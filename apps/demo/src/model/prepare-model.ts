import { createHash, randomUUID } from "node:crypto";
import { existsSync } from "node:fs";
import { mkdir, rename, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { basename, dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { KvError } from "@kv/interface";
import { z } from "zod";
import { buildOnnx, onnxBuilderVersion, onnxFileName } from "./onnx/build-onnx.js";
import { tinyModelConfig, tinyModelName, writeTinyModel } from "./tiny-model.js";
import {
  checkpointDigest,
  checkpointFiles,
  exists,
  openCheckpoint,
  readJson,
} from "./weights/checkpoint.js";
import { readDecoderConfig } from "./weights/decoder-config.js";

export interface PreparedModel {
  name: string;
  directory: string;
  onnxPath: string;
}

export interface PrepareOptions {
  cacheDirectory?: string | undefined;
  /**
   * Number of KV heads of the built-in model (1, 2, 4 or 8; default 4). Only for the built-in
   * model.
   */
  tinyKvHeads?: number | undefined;
  onProgress?: ((message: string) => void) | undefined;
}

/**
 * Paths of an exported model, in the order in which they are tried: optimum's, then that of ONNX
 * repositories on the Hub.
 */
const exportedPlaces = [onnxFileName, join("onnx", onnxFileName)];

/**
 * Makes a model ready to be opened. Without a directory: the built-in tiny model, generated on
 * first use. With one: a decoder exported to ONNX (`model.onnx` or `onnx/model.onnx`) is used
 * unchanged; a Hugging Face checkpoint (`config.json` and `*.safetensors`) is converted into the
 * cache once.
 *
 * @throws KvError KV_CONFIG_INVALID when the directory holds neither, KV_MODEL_UNSUPPORTED when it
 * cannot be converted.
 */
export async function prepareModel(
  directory: string | undefined,
  {
    cacheDirectory = defaultCacheDirectory(),
    tinyKvHeads,
    onProgress = () => {},
  }: PrepareOptions = {},
): Promise<PreparedModel> {
  if (directory === undefined) {
    const kvHeads = tinyKvHeads ?? 4;
    const key = `${tinyModelName}-${digest(JSON.stringify(tinyModelConfig({ kvHeads })))}`;
    const home = await cachedDirectory(cacheDirectory, key, async (draft) => {
      await writeTinyModel(draft, { kvHeads });
    });
    return { name: tinyModelName, directory: home, onnxPath: join(home, onnxFileName) };
  }

  const home = resolve(directory);
  const name = basename(home);
  if (tinyKvHeads !== undefined) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `tinyKvHeads ${tinyKvHeads} applies only to the built-in model, not to ${home}`,
    );
  }
  const configPath = join(home, "config.json");
  if (!(await exists(configPath))) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${home} is not a model directory: it has no config.json`,
    );
  }
  for (const place of exportedPlaces) {
    const onnxPath = join(home, place);
    if (await exists(onnxPath)) return { name, directory: home, onnxPath };
  }
  const files = await checkpointFiles(home);
  if (files.length === 0) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${home} holds neither ${exportedPlaces.join(" nor ")} nor model.safetensors`,
      {
        hint: "give a directory with a decoder exported to ONNX, or a Hugging Face checkpoint in safetensors",
      },
    );
  }
  const json = await readJson(configPath);
  const config = readDecoderConfig(json, { where: configPath });
  const key = `${name}-${digest(JSON.stringify(json), await checkpointDigest(home, files))}`;
  const converted = await cachedDirectory(cacheDirectory, key, async (draft) => {
    onProgress(`converting ${home} to ONNX in ${cacheDirectory}`);
    const weights = await openCheckpoint(home, files);
    try {
      await buildOnnx({ config, weights, directory: draft });
    } finally {
      await weights.close();
    }
  });
  return { name, directory: home, onnxPath: join(converted, onnxFileName) };
}

function digest(...parts: string[]): string {
  const hash = createHash("sha256").update(`builder ${onnxBuilderVersion}\n`);
  for (const part of parts) hash.update(`${part}\n`);
  return hash.digest("hex").slice(0, 16);
}

/**
 * `node_modules/.cache/kv-demo` of the repository that this file is in; of the system's temporary
 * directory elsewhere.
 */
export function defaultCacheDirectory(): string {
  let directory = dirname(fileURLToPath(import.meta.url));
  for (;;) {
    if (existsSync(join(directory, "pnpm-workspace.yaml"))) {
      return join(directory, "node_modules", ".cache", "kv-demo");
    }
    const parent = dirname(directory);
    if (parent === directory) return join(tmpdir(), "kv-demo");
    directory = parent;
  }
}

/**
 * The directory `cache/key`, filled by `write` when it does not exist. It appears complete or not
 * at all: it is written under another name and renamed, so that several processes may start at once
 * and a killed one leaves no incomplete directory.
 */
export async function cachedDirectory(
  cache: string,
  key: string,
  write: (directory: string) => Promise<void>,
): Promise<string> {
  const target = join(cache, key);
  if (await exists(target)) return target;
  const draft = join(cache, `.${key}.${randomUUID()}`);
  await mkdir(draft, { recursive: true });
  try {
    await write(draft);
    await rename(draft, target);
  } catch (error) {
    await rm(draft, { recursive: true, force: true });
    // Another process was faster. Its directory has the same key and therefore the same content.
    if (!(await exists(target))) throw error;
  }
  return target;
}

/**
 * Facts from the JSON files of a model. The number of layers and the KV shape are read from the
 * ONNX session.
 */
export interface ModelFacts {
  kvHeads: number | undefined;
  headDim: number | undefined;
  vocabSize: number | undefined;
  maxModelLen: number;
  eosTokenIds: readonly number[];
}

const size = z.number().int().positive().nullish();
const tokenIds = z
  .union([z.number().int().nonnegative(), z.array(z.number().int().nonnegative())])
  .nullish();
const schema = z.looseObject({
  num_attention_heads: size,
  num_key_value_heads: size,
  hidden_size: size,
  head_dim: size,
  vocab_size: size,
  max_position_embeddings: size,
  n_positions: size,
  n_head: size,
  n_embd: size,
  eos_token_id: tokenIds,
});
const generationSchema = z.looseObject({ eos_token_id: tokenIds });

/**
 * Reads config.json and, where present, generation_config.json (whose end-of-sequence tokens take
 * precedence, as in vLLM).
 *
 * @throws KvError KV_CONFIG_INVALID naming the file and the value.
 */
export async function readModelFacts(directory: string): Promise<ModelFacts> {
  const read = async <T>(file: string, shape: z.ZodType<T>): Promise<T> => {
    const path = join(directory, file);
    const parsed = shape.safeParse(await readJson(path));
    if (!parsed.success)
      throw new KvError("KV_CONFIG_INVALID", `${path}: ${z.prettifyError(parsed.error)}`);
    return parsed.data;
  };
  const config = await read("config.json", schema);
  const generation = (await exists(join(directory, "generation_config.json")))
    ? await read("generation_config.json", generationSchema)
    : undefined;

  const maxModelLen = config.max_position_embeddings ?? config.n_positions;
  if (maxModelLen == null) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${join(directory, "config.json")} has neither max_position_embeddings nor n_positions`,
    );
  }
  const heads = config.num_attention_heads ?? config.n_head ?? undefined;
  const hiddenSize = config.hidden_size ?? config.n_embd ?? undefined;
  const eos = generation?.eos_token_id ?? config.eos_token_id ?? [];
  return {
    kvHeads: config.num_key_value_heads ?? heads,
    headDim:
      config.head_dim ??
      (heads !== undefined && hiddenSize !== undefined ? hiddenSize / heads : undefined),
    vocabSize: config.vocab_size ?? undefined,
    maxModelLen,
    eosTokenIds: typeof eos === "number" ? [eos] : eos,
  };
}
