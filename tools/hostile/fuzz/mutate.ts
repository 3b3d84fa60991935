import { type FuzzTarget, isObject } from "./target.js";

/** A random integer from 0 to `below` - 1. */
export type Pick = (below: number) => number;

/** The readers' own tests cover their limits. */
const MAX_INPUT_BYTES = 1 << 16;

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

const known = new WeakMap<FuzzTarget, readonly string[]>();

function wordsOf(target: FuzzTarget, inputs: readonly Uint8Array[]): readonly string[] {
  const found = known.get(target);
  if (found !== undefined) return found;
  const texts = inputs.map((input) => Buffer.from(input).toString("latin1"));
  const words = [...(target.words ?? []), ...new Set(texts.join(" ").match(/\w{2,}:?/g))];
  known.set(target, words);
  return words;
}

const anyOf = <T>(list: readonly T[], pick: Pick) => list[pick(list.length)] as T;

/** One to eight changes, or a cut of two inputs. */
export function mutate(target: FuzzTarget, corpus: readonly Uint8Array[], pick: Pick): Uint8Array {
  const words = wordsOf(target, corpus);
  let input = anyOf(corpus, pick);
  for (let changes = 1 + pick(8); changes > 0; changes -= 1) {
    if (target.isJson === true && pick(4) > 0) input = mutateJson(input, words, pick);
    else if (pick(12) === 0) input = splice(input, anyOf(corpus, pick), pick);
    else input = mutateBytes(input, words, pick);
  }
  return input.subarray(0, MAX_INPUT_BYTES);
}

function splice(first: Uint8Array, second: Uint8Array, pick: Pick): Uint8Array {
  const begin = first.subarray(0, pick(first.length + 1));
  return Buffer.concat([begin, second.subarray(pick(second.length + 1))]);
}

function mutateBytes(input: Uint8Array, words: readonly string[], pick: Pick): Uint8Array {
  const at = pick(input.length + 1);
  const length = 1 + pick(Math.min(16, input.length - at + 1));
  const drawn = (draw: () => number) => Uint8Array.from({ length }, draw);
  const changes: readonly (() => readonly [removed: number, by: Uint8Array])[] = [
    () => [1, Uint8Array.of((input[at] ?? 0) ^ (1 << pick(8)))],
    () => [1, Uint8Array.of(anyOf(BYTES, pick))],
    () => [length, new Uint8Array()],
    () => [0, drawn(() => pick(256))],
    () => [pick(2) * length, new TextEncoder().encode(anyOf(words, pick))],
    // Small bytes, as lengths and counts are.
    () => [length, drawn(() => pick(4) * 85)],
    () => {
      const piece = input.subarray(at, at + length);
      return [0, Buffer.concat(Array(2 ** pick(pick(8) === 0 ? 12 : 4)).fill(piece))];
    },
  ];
  const [removed, by] = anyOf(changes, pick)();
  return Buffer.concat([input.subarray(0, at), by, input.subarray(at + removed)]);
}

function mutateJson(input: Uint8Array, words: readonly string[], pick: Pick): Uint8Array {
  try {
    const root = { value: JSON.parse(new TextDecoder().decode(input)) as unknown };
    changeMember(root, input.length, words, pick);
    return new TextEncoder().encode(JSON.stringify(root.value) ?? "null");
  } catch {
    // No JSON, or nested too deeply for JSON.stringify.
    return mutateBytes(input, words, pick);
  }
}

function changeMember(root: object, lengthBytes: number, words: readonly string[], pick: Pick) {
  let holder = root as Record<string, unknown>;
  let key = "value";
  for (let depth = pick(6); depth > 0; depth -= 1) {
    const next = holder[key];
    if (typeof next !== "object" || next === null || Object.keys(next).length === 0) break;
    holder = next as Record<string, unknown>;
    key = anyOf(Object.keys(next), pick);
  }

  const value = holder[key];
  const odd = anyOf(ODD_VALUES, pick);
  // Copies of copies of copies would fill the heap before they are cut.
  const mostCopies = 1 + Math.floor((16 * MAX_INPUT_BYTES) / lengthBytes);
  const changes: readonly (() => unknown)[] = [
    () => (holder === root ? odd : undefined),
    () => [value],
    () => (Array.isArray(value) ? Array(Math.min(2 ** pick(10), mostCopies)).fill(value[0]) : odd),
    () => (isObject(value) ? { ...value, [anyOf(words, pick)]: odd } : odd),
    () => {
      if (typeof value === "number") return value + anyOf(STEPS, pick);
      return typeof value === "string" ? anyOf(words, pick) : odd;
    },
    () => {
      let nested = odd;
      for (let levels = 2 ** pick(13); levels > 0; levels -= 1) nested = [nested];
      return nested;
    },
    () => odd,
  ];
  holder[key] = anyOf(changes, pick)();
}
