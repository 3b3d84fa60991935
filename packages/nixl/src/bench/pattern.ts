import { createHash } from "node:crypto";

export function fill(bytes: Uint8Array, seed: number): void {
  const words = new Uint32Array(bytes.buffer, bytes.byteOffset, bytes.length >> 2);
  let word = Math.imul(seed + 1, 0x9e3779b1);
  for (let index = 0; index < words.length; index++) {
    words[index] = word ^ index;
    word = (Math.imul(word, 1664525) + 1013904223) | 0;
  }
}

/** SHA-256 in hex. */
export function digest(bytes: Uint8Array): string {
  return createHash("sha256").update(bytes).digest("hex");
}

/** Shuffled ids are the same each time. */
export function idsOf(count: number, order: "contiguous" | "scattered"): Int32Array {
  const ids = Int32Array.from({ length: count }, (_, index) => index);
  if (order === "contiguous") return ids;
  let state = 1;
  for (let index = count - 1; index > 0; index--) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    const other = state % (index + 1);
    [ids[index], ids[other]] = [ids[other] ?? 0, ids[index] ?? 0];
  }
  return ids;
}
