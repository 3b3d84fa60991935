import { type FileHandle, open, writeFile } from "node:fs/promises";
import { join } from "node:path";
import type { DecoderConfig } from "../weights/decoder-config.js";
import type { WeightSource } from "../weights/weights.js";
import { decoderGraph, type TensorStore } from "./decoder-graph.js";
import { encodeOnnx } from "./onnx-proto.js";

/**
 * The version of the files that `buildOnnx` writes. A cached model of another version is not used.
 */
export const onnxBuilderVersion = 1;

export const onnxFileName = "model.onnx";
const dataFileName = "model.onnx_data";

/** With this alignment ONNX Runtime can map the file instead of reading it. */
const alignmentBytes = 4096;
const inlineLimitBytes = 4096;

/**
 * Writes `model.onnx` and, beside it, `model.onnx_data` with the weights, in the form of a Hugging
 * Face optimum export (IR version 10, opset 21):
 *
 * - inputs `input_ids`, `attention_mask`, `position_ids` (int64 `[batch, …]`) and, per layer i,
 *   `past_key_values.{i}.key` and `.value` (`[batch, kv_heads, past, head_dim]`);
 * - outputs `logits` (`[batch, 1, vocab]`, of the last position only: a long prompt times a large
 * vocabulary would
 *   not fit in memory) and `present.{i}.key` and `.value`; keys are those after the rotary embedding.
 *
 * Weights are outside of the model file because a protobuf is limited to 2 GiB.
 */
export async function buildOnnx(options: {
  config: DecoderConfig;
  weights: WeightSource;
  directory: string;
  /** Element type of `past_key_values` and `present`; arithmetic is float32 either way. */
  kvType?: "float32" | "float16";
}): Promise<void> {
  const { config, weights, directory, kvType = "float32" } = options;
  const file = await open(join(directory, dataFileName), "w");
  try {
    const graph = await decoderGraph({ config, weights, kvType, store: dataWriter(file) });
    const model = encodeOnnx(graph, { irVersion: 10, opset: 21, producer: "kv-demo" });
    await writeFile(join(directory, onnxFileName), model);
  } finally {
    await file.close();
  }
}

/** Stores small tensors in the model file and the others in the data file. */
function dataWriter(file: FileHandle): TensorStore {
  let end = 0;
  return async (data) => {
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    if (bytes.length <= inlineLimitBytes) return { inline: bytes };
    const offsetBytes = Math.ceil(end / alignmentBytes) * alignmentBytes;
    end = offsetBytes + bytes.length;
    for (let done = 0; done < bytes.length; ) {
      const { bytesWritten } = await file.write(
        bytes,
        done,
        bytes.length - done,
        offsetBytes + done,
      );
      done += bytesWritten;
    }
    return { file: dataFileName, offsetBytes, lengthBytes: bytes.length };
  };
}
