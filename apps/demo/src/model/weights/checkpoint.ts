import { createHash } from "node:crypto";
import { access, readFile, stat } from "node:fs/promises";
import { join } from "node:path";
import { KvError } from "@kv/interface";
import { z } from "zod";
import { openSafetensors } from "./safetensors.js";
import type { WeightSource } from "./weights.js";

const singleFile = "model.safetensors";
const indexFile = "model.safetensors.index.json";
const indexSchema = z.looseObject({
  weight_map: z.record(z.string(), z.string().regex(/^[\w.-]+$/)),
});

export async function checkpointFiles(directory: string): Promise<string[]> {
  if (await exists(join(directory, singleFile))) return [singleFile];
  const path = join(directory, indexFile);
  if (!(await exists(path))) return [];
  const index = indexSchema.safeParse(await readJson(path));
  if (!index.success)
    throw new KvError("KV_CONFIG_INVALID", `${path}: ${z.prettifyError(index.error)}`);
  return [...new Set(Object.values(index.data.weight_map))].sort();
}

export async function openCheckpoint(
  directory: string,
  files: readonly string[],
): Promise<WeightSource> {
  const parts: WeightSource[] = [];
  const close = async (): Promise<void> => {
    await Promise.all(parts.map((part) => part.close()));
  };
  try {
    for (const file of files) parts.push(await openSafetensors(join(directory, file)));
  } catch (error) {
    await close();
    throw error;
  }
  const holding = (name: string): WeightSource => {
    const part = parts.find((candidate) => candidate.has(name));
    if (part === undefined)
      throw new KvError("KV_MODEL_UNSUPPORTED", `${directory} holds no weight named ${name}`);
    return part;
  };
  return {
    has: (name) => parts.some((part) => part.has(name)),
    shape: (name) => holding(name).shape(name),
    read: async (name) => await holding(name).read(name),
    close,
  };
}

/**
 * Changes when the checkpoint does: sizes and modification times, not contents (which may be many
 * gigabytes).
 */
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

export async function exists(path: string): Promise<boolean> {
  return await access(path).then(
    () => true,
    () => false,
  );
}

/** @throws KvError KV_CONFIG_INVALID naming the file when it cannot be read or is not JSON. */
export async function readJson(path: string): Promise<unknown> {
  try {
    return JSON.parse(await readFile(path, "utf8"));
  } catch (error) {
    throw KvError.from(error, "KV_CONFIG_INVALID", `cannot read ${path}`);
  }
}
