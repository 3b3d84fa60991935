import { createHash } from "node:crypto";
import { basename, join, resolve } from "node:path";
import { KvError } from "@kv/interface";
import { buildOnnx, onnxBuilderVersion, onnxFileName } from "./build-onnx.js";
import { checkpointDigest, checkpointFiles, exists, openCheckpoint, readJson } from "./checkpoint.js";
import { readDecoderConfig } from "./decoder-config.js";
import { cachedDirectory, defaultCacheDirectory } from "./model-cache.js";
import { tinyModelConfig, tinyModelName, writeTinyModel } from "./tiny-model.js";

/** Where the parts of a model are that can be opened. */
export interface PreparedModel {
  name: string;
  /** Holds config.json and the tokenizer's files. */
  directory: string;
  onnxPath: string;
}

export interface PrepareOptions {
  /** Default: `node_modules/.cache/kv-demo` of the repository. */
  cacheDirectory?: string;
  /** Number of KV heads of the built-in model (1, 2, 4 or 8; default 4). Not for a model of your own. */
  tinyKvHeads?: number;
  /** Called before a build that takes seconds to minutes (a large checkpoint). */
  onProgress?: (message: string) => void;
}

/** Where an exported model lies, in the order tried: optimum's place, then that of the Hub's ONNX repositories. */
const exportedPlaces = [onnxFileName, join("onnx", onnxFileName)];

/**
 * Makes a model ready to be opened. Without a directory: the built-in tiny model, generated on first use. With one:
 * a decoder exported to ONNX (`model.onnx` or `onnx/model.onnx`) is taken as it is; a Hugging Face checkpoint
 * (`config.json` and `*.safetensors`) is converted into the cache once.
 *
 * @throws KvError KV_CONFIG_INVALID when the directory holds neither, KV_MODEL_UNSUPPORTED when it cannot be converted.
 */
export async function prepareModel(
  directory: string | undefined,
  { cacheDirectory = defaultCacheDirectory(), tinyKvHeads, onProgress = () => {} }: PrepareOptions = {},
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
      `tinyKvHeads ${tinyKvHeads} is for the built-in model, not for ${home}`,
    );
  }
  const configPath = join(home, "config.json");
  if (!(await exists(configPath))) {
    throw new KvError("KV_CONFIG_INVALID", `${home} is no model directory: it has no config.json`);
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
