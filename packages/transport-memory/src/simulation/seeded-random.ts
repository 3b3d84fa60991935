import type { Random } from "@kv/interface";

/** A reproducible source of randomness. */
export interface SeededRandom extends Random {
  readonly seed: string;
  /** An independent stream: draws from one do not change the other. */
  fork(label: string): SeededRandom;
  integer(below: number): number;
}

/** Creates a source that depends on the seed alone (generator: sfc32). */
export function seededRandom(seed: number | string): SeededRandom {
  const text = String(seed);
  let a = hash(text, 0x9e3779b9);
  let b = hash(text, 0x243f6a88);
  let c = hash(text, 0xb7e15162);
  let counter = 1;

  function draw(): number {
    const sum = (((a + b) | 0) + counter) | 0;
    counter = (counter + 1) | 0;
    a = b ^ (b >>> 9);
    b = (c + (c << 3)) | 0;
    c = (((c << 21) | (c >>> 11)) + sum) | 0;
    return sum >>> 0;
  }
  for (let round = 0; round < 12; round++) draw();

  const hex = (bits: number): string => bits.toString(16).padStart(8, "0");
  return {
    seed: text,
    next: () => draw() / 2 ** 32,
    integer: (below) => Math.floor((draw() / 2 ** 32) * below),
    uuid() {
      const digits = hex(draw()) + hex(draw()) + hex(draw()) + hex(draw());
      const variant = "89ab".charAt(draw() & 3);
      return `${digits.slice(0, 8)}-${digits.slice(8, 12)}-4${digits.slice(13, 16)}-${variant}${digits.slice(17, 20)}-${digits.slice(20)}`;
    },
    fork: (label) => seededRandom(`${text}/${label}`),
  };
}

/** FNV-1a over the code units, with a final mix. */
function hash(text: string, basis: number): number {
  let state = basis | 0;
  for (let index = 0; index < text.length; index++) {
    state = Math.imul(state ^ text.charCodeAt(index), 0x01000193);
  }
  state = Math.imul(state ^ (state >>> 16), 0x45d9f3b);
  return (state ^ (state >>> 15)) | 0;
}
