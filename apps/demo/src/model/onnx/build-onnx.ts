import { open, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { DecoderGraph, type DecoderGraphOptions } from "./decoder-graph.js";
import { encodeOnnx } from "./onnx-proto.js";

/** A cached model of another version is not used. */
export const onnxBuilderVersion = 3;

export const onnxFileName = "model.onnx";
const dataFileName = "model.onnx_data";

/** With this alignment ONNX Runtime can map the file instead of reading it. */
const alignmentBytes = 4096;
const inlineLimitBytes = 4096;

/**
 * Writes `model.onnx` and, beside it, `model.onnx_data` with the weights, in the form of a Hugging
 * Face optimum export (opset 23):
 *
 * - inputs `input_ids`, `position_ids` (int64 `[batch, seq]`) and, per layer i,
 *   `past_key_values.{i}.key` and `.value` (`[batch, kv_heads, past, head_dim]`);
 * - outputs `logits` (`[batch, 1, vocab]`, of the last position only: those of a long prompt would
 *   not fit in memory) and `present.{i}.key` and `.value`, keys after the rotary embedding.
 *
 * Weights are outside of the model file because a protobuf is limited to 2 GiB.
 */
export async function buildOnnx({
  directory,
  ...decoder
}: Omit<DecoderGraphOptions, "store"> & { readonly directory: string }): Promise<void> {
  const file = await open(join(directory, dataFileName), "w");
  let end = 0;
  async function store(data: Float32Array) {
    const inline = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    const { length } = inline;
    if (length <= inlineLimitBytes) return { inline };
    const offsetBytes = Math.ceil(end / alignmentBytes) * alignmentBytes;
    end = offsetBytes + length;
    for (let done = 0; done < length; ) {
      const written = await file.write(inline, done, length - done, offsetBytes + done);
      done += written.bytesWritten;
    }
    return { file: dataFileName, offsetBytes, lengthBytes: length };
  }
  try {
    const graph = await DecoderGraph.build({ ...decoder, store });
    await writeFile(join(directory, onnxFileName), encodeOnnx(graph));
  } finally {
    await file.close();
  }
}
