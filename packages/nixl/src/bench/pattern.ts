import { createHash, randomFillSync } from "node:crypto";

/** Node fills up to 2 GiB at once. */
const FILLED_BYTES = 1 << 30;

/** Each call writes other bytes. */
export function fill(bytes: Uint8Array): void {
  for (let at = 0; at < bytes.length; at += FILLED_BYTES)
    randomFillSync(bytes.subarray(at, at + FILLED_BYTES));
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
