import { type FileHandle, open } from "node:fs/promises";
import { KvError } from "@kv/interface";
import { z } from "zod";
import { bfloat16ToFloat32, float16ToFloat32 } from "./float16.js";
import type { WeightSource } from "./weights.js";

const elementBytes = { F32: 4, F16: 2, BF16: 2 } as const;
type Element = keyof typeof elementBytes;

const headerLimitBytes = 100_000_000;
const size = z.number().int().nonnegative().max(Number.MAX_SAFE_INTEGER);
const tensorSchema = z.object({
  dtype: z.string(),
  shape: z.array(size).max(8),
  data_offsets: z.tuple([size, size]),
});

interface Tensor {
  dtype: string;
  shape: readonly number[];
  offsetBytes: number;
  lengthBytes: number;
}

/**
 * Opens a safetensors file. The header is read and checked here (offsets inside the file, lengths
 * that fit shape and type); tensors are read one by one when asked for. F32, F16 and BF16 are read,
 * as float32.
 *
 * @throws KvError KV_CONFIG_INVALID for a file that is not well-formed, KV_MODEL_UNSUPPORTED on
 * reading another type.
 */
export async function openSafetensors(path: string): Promise<WeightSource> {
  const file = await open(path, "r");
  try {
    const tensors = await readHeader(file, path);
    const find = (name: string): Tensor => {
      const tensor = tensors.get(name);
      if (tensor === undefined)
        throw new KvError("KV_MODEL_UNSUPPORTED", `${path} holds no weight named ${name}`);
      return tensor;
    };
    return {
      has: (name) => tensors.has(name),
      shape: (name) => find(name).shape,
      read: async (name) => await readTensor(file, path, name, find(name)),
      close: async () => await file.close(),
    };
  } catch (error) {
    await file.close();
    throw error;
  }
}

async function readHeader(file: FileHandle, path: string): Promise<Map<string, Tensor>> {
  const malformed = (what: string, cause?: unknown): KvError =>
    new KvError("KV_CONFIG_INVALID", `${path} is not a safetensors file: ${what}`, { cause });
  const fileBytes = (await file.stat()).size;
  const prefix = await readExactly(file, path, 0, Math.min(8, fileBytes));
  if (prefix.length < 8) throw malformed(`${fileBytes} bytes, shorter than its prefix of 8`);
  const headerBytes = Number(prefix.readBigUInt64LE(0));
  if (headerBytes > headerLimitBytes || headerBytes > fileBytes - 8) {
    throw malformed(`a header of ${headerBytes} bytes in a file of ${fileBytes}`);
  }
  let json: unknown;
  try {
    json = JSON.parse((await readExactly(file, path, 8, headerBytes)).toString("utf8"));
  } catch (error) {
    throw malformed("its header is not JSON", error);
  }
  if (typeof json !== "object" || json === null || Array.isArray(json))
    throw malformed("its header is not a map");

  const dataStart = 8 + headerBytes;
  const tensors = new Map<string, Tensor>();
  for (const [name, value] of Object.entries(json)) {
    if (name === "__metadata__") continue;
    const entry = tensorSchema.safeParse(value);
    if (!entry.success) throw malformed(`entry ${name}: ${z.prettifyError(entry.error)}`);
    const [from, to] = entry.data.data_offsets;
    if (to < from || dataStart + to > fileBytes) {
      throw malformed(`entry ${name} spans bytes ${from} to ${to} of ${fileBytes - dataStart}`);
    }
    const { dtype, shape } = entry.data;
    const elements = shape.reduce((product, axis) => product * axis, 1);
    const width = isElement(dtype) ? elementBytes[dtype] : undefined;
    if (width !== undefined && elements * width !== to - from) {
      throw malformed(
        `entry ${name}: ${dtype} [${shape.join(", ")}] needs ${elements * width} bytes, has ${to - from}`,
      );
    }
    tensors.set(name, { dtype, shape, offsetBytes: dataStart + from, lengthBytes: to - from });
  }
  return tensors;
}

async function readTensor(
  file: FileHandle,
  path: string,
  name: string,
  tensor: Tensor,
): Promise<Float32Array> {
  const { dtype } = tensor;
  if (!isElement(dtype)) {
    throw new KvError(
      "KV_MODEL_UNSUPPORTED",
      `${path}: weight ${name} is ${dtype}, not ${Object.keys(elementBytes).join(", ")}`,
      { hint: "use the unquantized checkpoint" },
    );
  }
  const bytes = await readExactly(file, path, tensor.offsetBytes, tensor.lengthBytes);
  if (dtype === "F32") return new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
  const halves = new Uint16Array(bytes.buffer, bytes.byteOffset, bytes.length / 2);
  return dtype === "F16" ? float16ToFloat32(halves) : bfloat16ToFloat32(halves);
}

function isElement(dtype: string): dtype is Element {
  return Object.hasOwn(elementBytes, dtype);
}

/** Its own allocation, never a slice of Node's pool: typed arrays over it must be aligned. */
async function readExactly(
  file: FileHandle,
  path: string,
  from: number,
  length: number,
): Promise<Buffer> {
  const bytes = Buffer.from(new ArrayBuffer(length));
  for (let done = 0; done < length; ) {
    const { bytesRead } = await file.read(bytes, done, length - done, from + done);
    if (bytesRead === 0) {
      throw new KvError(
        "KV_CONFIG_INVALID",
        `${path} ended at byte ${from + done}, ${from + length} expected`,
      );
    }
    done += bytesRead;
  }
  return bytes;
}
