/**
 * Fills memory with 32-bit words that depend on position and seed; fast enough for hundreds of MiB.
 */
export function fillPattern(bytes: Uint8Array, seed: number): void {
  const words = new Uint32Array(bytes.buffer, bytes.byteOffset, bytes.length >> 2);
  for (let index = 0; index < words.length; index++)
    words[index] = Math.imul(index + seed * 7919, 2654435761);
}

/**
 * The ids below `count`: in order, or without adjacent neighbours where `step` and `count` are
 * coprime.
 */
export function scattered(count: number, step = 1): Int32Array {
  return Int32Array.from({ length: count }, (_, index) => (index * step) % count);
}
