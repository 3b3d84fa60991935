import { mkdir, readFile, rename, writeFile } from "node:fs/promises";
import { dirname } from "node:path";
import { type KvCaches, KvError } from "@kv/interface";

/** Writes the blocks in the given order, region by region. The file gets its name only when it is complete. */
export async function saveBlocks(
  path: string,
  caches: KvCaches,
  blockIds: readonly number[],
): Promise<void> {
  const parts: Uint8Array[] = [];
  for (const { memory, offsetBytes, blockStrideBytes, blockLengthBytes } of caches.regions) {
    const runs = blockIds.flatMap((id) => [offsetBytes + id * blockStrideBytes, blockLengthBytes]);
    parts.push(new Uint8Array(await memory.gather(Float64Array.from(runs))));
  }
  await mkdir(dirname(path), { recursive: true });
  await writeFile(`${path}.part`, Buffer.concat(parts));
  await rename(`${path}.part`, path);
}

/**
 * Reads the blocks from the file. Returns false when the file does not exist yet. It checks the length of the file before it writes to a block.
 * Errors: `KV_BLOCKS_MISMATCH`.
 */
export async function loadBlocks(
  path: string,
  caches: KvCaches,
  blockIds: readonly number[],
  skipBlocks: number,
): Promise<boolean> {
  let content: Buffer;
  try {
    content = await readFile(path);
  } catch (error) {
    if ((error as { code?: string }).code === "ENOENT") return false;
    throw error;
  }
  const count = skipBlocks + blockIds.length;
  const expected = caches.regions.reduce(
    (sum, { blockLengthBytes }) => sum + count * blockLengthBytes,
    0,
  );
  if (content.length !== expected) {
    throw new KvError(
      "KV_BLOCKS_MISMATCH",
      `${path} has ${content.length} bytes, but ${count} local blocks have ${expected}`,
    );
  }
  let at = 0;
  for (const { memory, offsetBytes, blockStrideBytes, blockLengthBytes } of caches.regions) {
    const runs = blockIds.flatMap((id) => [offsetBytes + id * blockStrideBytes, blockLengthBytes]);
    const from = at + skipBlocks * blockLengthBytes;
    const source = new Uint8Array(
      content.subarray(from, from + blockIds.length * blockLengthBytes),
    );
    await memory.scatter(Float64Array.from(runs), source.buffer);
    at += count * blockLengthBytes;
  }
  return true;
}
