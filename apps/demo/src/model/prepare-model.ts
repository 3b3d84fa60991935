import { createHash, randomUUID } from "node:crypto";
import { existsSync } from "node:fs";
import { mkdir, rename, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { basename, dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { KvError } from "@kv/interface";
import { seededRandom } from "@kv/transport-memory";
import { z } from "zod";
import { buildOnnx, onnxBuilderVersion, onnxFileName } from "./onnx/build-onnx.js";
import {
  checkpointDigest,
  checkpointFiles,
  exists,
  readJson,
  withCheckpoint,
} from "./weights/checkpoint.js";
import { type DecoderConfig, readDecoderConfig } from "./weights/decoder-config.js";
import { makeWeights, type Weights } from "./weights/weights.js";

export interface PreparedModel {
  readonly name: string;
  readonly directory: string;
  readonly onnxPath: string;
}

export interface PrepareOptions {
  readonly cacheDirectory?: string | undefined;
  /** KV heads of the built-in model: 1, 2, 4 or 8. Default: 4. */
  readonly tinyKvHeads?: number | undefined;
  readonly onProgress?: ((message: string) => void) | undefined;
}

/** Of optimum, then of ONNX repositories on the Hub. */
const exportedPlaces = [onnxFileName, join("onnx", onnxFileName)];

/**
 * Without a directory: the built-in tiny model, generated on first use. A decoder exported to ONNX
 * is used unchanged; a Hugging Face checkpoint is converted into the cache once.
 * @throws `KV_CONFIG_INVALID` when the directory holds neither, `KV_MODEL_UNSUPPORTED` when it
 * cannot be converted.
 */
export async function prepareModel(
  directory: string | undefined,
  options: PrepareOptions = {},
): Promise<PreparedModel> {
  const { cacheDirectory = defaultCacheDirectory(), tinyKvHeads, onProgress } = options;
  if (directory === undefined) {
    const kvHeads = tinyKvHeads ?? 4;
    const key = `${tinyModelName}-${digest(JSON.stringify(tinyModelConfig(kvHeads)))}`;
    const home = await cachedDirectory(cacheDirectory, key, (draft) =>
      writeTinyModel(draft, kvHeads),
    );
    return { name: tinyModelName, directory: home, onnxPath: join(home, onnxFileName) };
  }

  const home = resolve(directory);
  const name = basename(home);
  const refuse = (message: string, hint?: string) =>
    new KvError("KV_CONFIG_INVALID", message, { hint });
  if (tinyKvHeads !== undefined)
    throw refuse(`tinyKvHeads ${tinyKvHeads} applies only to the built-in model, not to ${home}`);
  const configPath = join(home, "config.json");
  if (!(await exists(configPath)))
    throw refuse(`${home} is not a model directory: it has no config.json`);
  for (const place of exportedPlaces) {
    const onnxPath = join(home, place);
    if (await exists(onnxPath)) return { name, directory: home, onnxPath };
  }
  const files = await checkpointFiles(home);
  if (files.length === 0) {
    throw refuse(
      `${home} holds neither ${exportedPlaces.join(" nor ")} nor model.safetensors`,
      "give a directory with a decoder exported to ONNX, or a Hugging Face checkpoint in safetensors",
    );
  }
  const json = await readJson(configPath, z.unknown());
  const config = readDecoderConfig(json, configPath);
  const key = `${name}-${digest(JSON.stringify(json), await checkpointDigest(home, files))}`;
  const converted = await cachedDirectory(cacheDirectory, key, async (draft) => {
    onProgress?.(`converting ${home} to ONNX in ${cacheDirectory}`);
    await withCheckpoint(home, files, (weights) =>
      buildOnnx({ config, weights, directory: draft }),
    );
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
  while (!existsSync(join(directory, "pnpm-workspace.yaml"))) {
    const parent = dirname(directory);
    if (parent === directory) return join(tmpdir(), "kv-demo");
    directory = parent;
  }
  return join(directory, "node_modules", ".cache", "kv-demo");
}

/**
 * The directory `cache/key`, filled by `write` when it does not exist. It is written under another
 * name and renamed, so that several processes may start at once and a killed one leaves no
 * incomplete directory.
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
    // Another process was faster.
    if (!(await exists(target))) throw error;
  }
  return target;
}

export interface ModelFacts {
  readonly kvHeads: number | undefined;
  readonly headDim: number | undefined;
  readonly vocabSize: number | undefined;
  readonly maxModelLen: number;
  readonly eosTokenIds: readonly number[];
}

const size = z.number().int().positive().nullish();
const tokenId = z.number().int().nonnegative();
const generationSchema = z.looseObject({
  eos_token_id: z.union([tokenId, z.array(tokenId)]).nullish(),
});
const modelSchema = generationSchema.extend({
  num_attention_heads: size,
  num_key_value_heads: size,
  hidden_size: size,
  head_dim: size,
  vocab_size: size,
  max_position_embeddings: size,
  n_positions: size,
  n_head: size,
  n_embd: size,
});

/**
 * The end-of-sequence tokens of generation_config.json take precedence, as in vLLM.
 * @throws `KV_CONFIG_INVALID` naming the file and the value.
 */
export async function readModelFacts(directory: string): Promise<ModelFacts> {
  const configPath = join(directory, "config.json");
  const config = await readJson(configPath, modelSchema);
  const generationPath = join(directory, "generation_config.json");
  const generation = (await exists(generationPath))
    ? await readJson(generationPath, generationSchema)
    : undefined;
  const maxModelLen = config.max_position_embeddings ?? config.n_positions;
  if (maxModelLen == null) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${configPath} has neither max_position_embeddings nor n_positions`,
    );
  }
  const heads = config.num_attention_heads ?? config.n_head ?? undefined;
  const hiddenSize = config.hidden_size ?? config.n_embd ?? undefined;
  const eos = generation?.eos_token_id ?? config.eos_token_id ?? [];
  return {
    kvHeads: config.num_key_value_heads ?? heads,
    headDim: config.head_dim ?? (heads && hiddenSize && hiddenSize / heads),
    vocabSize: config.vocab_size ?? undefined,
    maxModelLen,
    eosTokenIds: typeof eos === "number" ? [eos] : eos,
  };
}

const tinyModelName = "tiny-qwen3";

/**
 * The `config.json` of the demo's model: 2.9 million random weights in the shape of Qwen3, and
 * words `t0` to `t1023`.
 */
export function tinyModelConfig(kvHeads = 4) {
  return {
    architectures: ["Qwen3ForCausalLM"],
    model_type: "qwen3",
    vocab_size: 1024,
    hidden_size: 256,
    intermediate_size: 512,
    num_hidden_layers: 4,
    num_attention_heads: 8,
    num_key_value_heads: kvHeads,
    head_dim: 32,
    max_position_embeddings: 2048,
    rope_parameters: { rope_theta: 10_000, rope_type: "default" },
    rms_norm_eps: 1e-6,
    tie_word_embeddings: false,
    bos_token_id: 1,
    eos_token_id: 2,
    pad_token_id: 0,
    hidden_act: "silu",
    dtype: "float32",
  };
}

// Tokens 3 to 5 open a user's turn, any other turn and the answer.
const chatTemplate =
  "{% for message in messages %}{{ 't3 ' if message['role'] == 'user' else 't4 ' }}{{ message['content'] }} {% endfor %}" +
  "{% if add_generation_prompt %}t5{% endif %}";

async function writeTinyModel(directory: string, kvHeads: number): Promise<void> {
  const json = tinyModelConfig(kvHeads);
  const config = readDecoderConfig(json, tinyModelName);
  await buildOnnx({ config, weights: tinyWeights(config), directory });
  await writeFile(join(directory, "config.json"), JSON.stringify(json, null, 2));
  const tokenizer = {
    tokenizer_class: "NumberedWordTokenizer",
    bos_token: "t1",
    eos_token: "t2",
    pad_token: "t0",
    unk_token: "t0",
    chat_template: chatTemplate,
  };
  await writeFile(join(directory, "tokenizer_config.json"), JSON.stringify(tokenizer, null, 2));
}

/** With so large a deviation, the next token follows from the whole prompt. */
const DEVIATION = 0.08;

/** Normal weights, the same in every run. */
function tinyWeights(config: DecoderConfig): Weights {
  return makeWeights(config, (name, [rows, columns]) => {
    const { next } = seededRandom(name);
    return Float32Array.from({ length: rows * columns }, () => {
      const radius = Math.sqrt(-2 * Math.log(1 - next()));
      return DEVIATION * radius * Math.cos(2 * Math.PI * next());
    });
  });
}
