import { createHash } from "node:crypto";
import { access, type FileHandle, open, readFile, stat } from "node:fs/promises";
import { join } from "node:path";
import { KvError } from "@kv/interface";
import { z } from "zod";
import { bfloat16ToFloat32, float16ToFloat32 } from "./float16.js";
import type { Weight, Weights } from "./weights.js";

const singleFile = "model.safetensors";
const indexFile = "model.safetensors.index.json";
const indexSchema = z.looseObject({
  weight_map: z.record(z.string(), z.string().regex(/^[\w.-]+$/)),
});

export async function checkpointFiles(directory: string): Promise<string[]> {
  if (await exists(join(directory, singleFile))) return [singleFile];
  const path = join(directory, indexFile);
  if (!(await exists(path))) return [];
  const index = await readJson(path, indexSchema);
  return [...new Set(Object.values(index.weight_map))].sort();
}

export async function withCheckpoint(
  directory: string,
  files: readonly string[],
  use: (weights: Weights) => Promise<void>,
): Promise<void> {
  const opened: FileHandle[] = [];
  const byName = new Map<string, Weight>();
  try {
    for (const name of files) {
      const path = join(directory, name);
      const file = await open(path, "r");
      opened.push(file);
      for (const [weight, tensor] of await readTensors(file, path)) byName.set(weight, tensor);
    }
    await use({ where: directory, byName });
  } finally {
    for (const file of opened) await file.close();
  }
}

/** Of sizes and modification times, not contents (which may be many gigabytes). */
export async function checkpointDigest(
  directory: string,
  files: readonly string[],
): Promise<string> {
  const hash = createHash("sha256");
  for (const file of files) {
    const { size, mtimeMs } = await stat(join(directory, file));
    hash.update(`${join(directory, file)}\n${size}\n${mtimeMs}\n`);
  }
  return hash.digest("hex");
}

const readers = {
  F32: { width: 4, read: (data: ArrayBuffer) => new Float32Array(data) },
  F16: { width: 2, read: (data: ArrayBuffer) => float16ToFloat32(new Uint16Array(data)) },
  BF16: { width: 2, read: (data: ArrayBuffer) => bfloat16ToFloat32(new Uint16Array(data)) },
};

const headerLimitBytes = 100_000_000;
const size = z.number().int().nonnegative().max(Number.MAX_SAFE_INTEGER);
const tensorSchema = z.object({
  dtype: z.string(),
  shape: z.array(size).max(8),
  data_offsets: z.tuple([size, size]),
});

/**
 * The tensors of a safetensors file, whose header is checked here.
 * @throws `KV_CONFIG_INVALID` for a file that is not well-formed, `KV_MODEL_UNSUPPORTED` on reading
 * another type.
 */
async function readTensors(file: FileHandle, path: string): Promise<Map<string, Weight>> {
  const malformed = (what: string, cause?: unknown): KvError =>
    new KvError("KV_CONFIG_INVALID", `${path} is not a safetensors file: ${what}`, { cause });
  const fileBytes = (await file.stat()).size;
  if (fileBytes < 8) throw malformed(`${fileBytes} bytes, shorter than its prefix of 8`);
  const prefix = new DataView(await readExactly(file, path, 0, 8));
  const headerBytes = Number(prefix.getBigUint64(0, true));
  if (headerBytes > headerLimitBytes || headerBytes > fileBytes - 8)
    throw malformed(`a header of ${headerBytes} bytes in a file of ${fileBytes}`);
  let json: unknown;
  try {
    json = JSON.parse(Buffer.from(await readExactly(file, path, 8, headerBytes)).toString());
  } catch (error) {
    throw malformed("its header is not JSON", error);
  }
  if (typeof json !== "object" || json === null || Array.isArray(json))
    throw malformed("its header is not a map");

  const dataStart = 8 + headerBytes;
  const tensors = new Map<string, Weight>();
  for (const [name, value] of Object.entries(json)) {
    if (name === "__metadata__") continue;
    const entry = tensorSchema.safeParse(value);
    if (!entry.success) throw malformed(`entry ${name}: ${z.prettifyError(entry.error)}`);
    const { dtype, shape, data_offsets } = entry.data;
    const [from, to] = data_offsets;
    if (to < from || dataStart + to > fileBytes)
      throw malformed(`entry ${name} spans bytes ${from} to ${to} of ${fileBytes - dataStart}`);
    const reader = Object.hasOwn(readers, dtype)
      ? readers[dtype as keyof typeof readers]
      : undefined;
    const needed = reader && shape.reduce((product, axis) => product * axis, reader.width);
    if (needed !== undefined && needed !== to - from) {
      throw malformed(
        `entry ${name}: ${dtype} [${shape.join(", ")}] needs ${needed} bytes, has ${to - from}`,
      );
    }
    tensors.set(name, {
      shape,
      async read() {
        if (reader !== undefined)
          return reader.read(await readExactly(file, path, dataStart + from, to - from));
        throw new KvError(
          "KV_MODEL_UNSUPPORTED",
          `${path}: weight ${name} is ${dtype}, not ${Object.keys(readers).join(", ")}`,
          { hint: "use the unquantized checkpoint" },
        );
      },
    });
  }
  return tensors;
}

/** A buffer of its own, so that typed arrays over it are aligned. */
async function readExactly(
  file: FileHandle,
  path: string,
  from: number,
  length: number,
): Promise<ArrayBuffer> {
  const bytes = new Uint8Array(length);
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
  return bytes.buffer;
}

export function exists(path: string): Promise<boolean> {
  return access(path).then(
    () => true,
    () => false,
  );
}

/** @throws `KV_CONFIG_INVALID` naming the file when it cannot be read or is not what it should be. */
export async function readJson<T>(path: string, schema: z.ZodType<T>): Promise<T> {
  let json: unknown;
  try {
    json = JSON.parse(await readFile(path, "utf8"));
  } catch (error) {
    throw KvError.from(error, "KV_CONFIG_INVALID", `cannot read ${path}`);
  }
  const parsed = schema.safeParse(json);
  if (parsed.success) return parsed.data;
  throw new KvError("KV_CONFIG_INVALID", `${path}: ${z.prettifyError(parsed.error)}`);
}
