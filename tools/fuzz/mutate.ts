import type { FuzzTarget } from "./target.js";

/** A random integer from 0 to `below` - 1. */
export type Pick = (below: number) => number;

/** Seeded numbers (mulberry32): the same seed makes the same inputs. */
export function seededPick(seed: number): Pick {
  let state = seed >>> 0;
  return (below) => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return Math.floor((((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32) * below);
  };
}

/**
 * Longest input. Each target's readers have limits above and below it; their own tests cover the
 * limits.
 */
export const MAX_INPUT_BYTES = 1 << 16;

/** Bytes with a meaning in msgpack, JSON or UTF-8, and the borders of integers. */
const BYTES = [
  0, 1, 0x7f, 0x80, 0x90, 0xc0, 0xc1, 0xc4, 0xc6, 0xcb, 0xcf, 0xd3, 0xd9, 0xdb, 0xdd, 0xdf, 0xff,
  10, 34, 92,
];
const ODD_VALUES: readonly unknown[] = [
  null,
  true,
  false,
  0,
  -1,
  1,
  0.5,
  1e308,
  -1e308,
  2 ** 31,
  2 ** 53,
  2 ** 53 + 2,
  -(2 ** 63),
  65_536,
  "",
  "x",
  "0",
  "\u0000",
  "\ud800",
  "__proto__",
  "constructor",
  [],
  [[]],
  [null],
  {},
  { a: 1 },
  "x".repeat(600),
  "127.0.0.1",
  "*",
];

const STEPS = [-1, 1, 0.5, 2 ** 32];

/** One to eight changes of an input, or a cut of two inputs. */
export function mutate(target: FuzzTarget, corpus: readonly Uint8Array[], pick: Pick): Uint8Array {
  const any = () => corpus[pick(corpus.length)] ?? new Uint8Array();
  let input = any();
  for (let changes = 1 + pick(8); changes > 0; changes -= 1) {
    if (target.isJson === true && pick(4) > 0) input = mutateJson(input, target.words, pick);
    else if (pick(12) === 0) input = splice(input, any(), pick);
    else input = mutateBytes(input, target.words, pick);
  }
  return input.subarray(0, MAX_INPUT_BYTES);
}

function splice(first: Uint8Array, second: Uint8Array, pick: Pick): Uint8Array {
  return Buffer.concat([
    first.subarray(0, pick(first.length + 1)),
    second.subarray(pick(second.length + 1)),
  ]);
}

function replaceRange(input: Uint8Array, at: number, length: number, by: Uint8Array): Uint8Array {
  return Buffer.concat([input.subarray(0, at), by, input.subarray(at + length)]);
}

function mutateBytes(input: Uint8Array, words: readonly string[], pick: Pick): Uint8Array {
  const at = pick(input.length + 1);
  const length = 1 + pick(Math.min(16, input.length - at + 1));
  const none = new Uint8Array();
  switch (pick(7)) {
    case 0:
      return replaceRange(input, at, 1, Uint8Array.of((input[at] ?? 0) ^ (1 << pick(8))));
    case 1:
      return replaceRange(input, at, 1, Uint8Array.of(BYTES[pick(BYTES.length)] ?? 0));
    case 2:
      return replaceRange(input, at, length, none);
    case 3:
      return replaceRange(
        input,
        at,
        0,
        Uint8Array.from({ length }, () => pick(256)),
      );
    case 4:
      return replaceRange(
        input,
        at,
        pick(2) * length,
        new TextEncoder().encode(words[pick(words.length)]),
      );
    case 5:
      // Small bytes, as lengths and counts are.
      return replaceRange(
        input,
        at,
        length,
        Uint8Array.from({ length }, () => pick(4) * 85),
      );
    default: {
      const piece = input.subarray(at, at + length);
      const times = 2 ** pick(pick(8) === 0 ? 12 : 4);
      return replaceRange(input, at, 0, Buffer.concat(Array.from({ length: times }, () => piece)));
    }
  }
}

/**
 * Replaces, adds, removes, repeats or nests one value of a JSON text; changes bytes where it is not
 * JSON.
 */
function mutateJson(input: Uint8Array, words: readonly string[], pick: Pick): Uint8Array {
  let root: { value: unknown };
  try {
    root = { value: JSON.parse(new TextDecoder().decode(input)) };
  } catch {
    return mutateBytes(input, words, pick);
  }
  let holder: Record<string, unknown> = root as Record<string, unknown>;
  let key = "value";
  for (let depth = pick(6); depth > 0; depth -= 1) {
    const next = holder[key];
    if (typeof next !== "object" || next === null) break;
    const keys = Object.keys(next);
    if (keys.length === 0) break;
    holder = next as Record<string, unknown>;
    key = keys[pick(keys.length)] ?? "";
  }
  const value = holder[key];
  const odd = ODD_VALUES[pick(ODD_VALUES.length)];
  // Copies of copies of copies would fill the heap before they are cut.
  const most = 1 + Math.floor((16 * MAX_INPUT_BYTES) / input.length);
  switch (pick(7)) {
    case 0:
      if (holder === (root as unknown)) holder[key] = odd;
      else delete holder[key];
      break;
    case 1:
      holder[key] = [value];
      break;
    case 2:
      if (Array.isArray(value))
        holder[key] = Array.from({ length: Math.min(2 ** pick(10), most) }, () => value[0]);
      else holder[key] = odd;
      break;
    case 3:
      if (typeof value === "object" && value !== null && !Array.isArray(value))
        (value as Record<string, unknown>)[words[pick(words.length)] ?? "x"] = odd;
      else holder[key] = odd;
      break;
    case 4:
      if (typeof value === "number") holder[key] = value + (STEPS[pick(STEPS.length)] ?? 1);
      else if (typeof value === "string") holder[key] = words[pick(words.length)];
      else holder[key] = odd;
      break;
    case 5: {
      let nested: unknown = odd;
      for (let levels = 2 ** pick(13); levels > 0; levels -= 1) nested = [nested];
      holder[key] = nested;
      break;
    }
    default:
      holder[key] = odd;
  }
  try {
    return new TextEncoder().encode(JSON.stringify(root.value) ?? "null");
  } catch {
    // Nested too deeply for JSON.stringify.
    return mutateBytes(input, words, pick);
  }
}
