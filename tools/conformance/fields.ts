import type { BlockIds, KvCacheKind } from "@kv/interface";
import { Difference } from "./outcome.js";

/** The vectors' name of each kind, and ours. */
const KINDS: ReadonlyMap<unknown, KvCacheKind> = new Map([
  ["full", "full"],
  ["mla", "mla"],
  ["swa", "swa"],
  ["mamba", "mamba"],
  ["circ", "circular"],
]);

/** A field of an unexpected type fails the case. */
export function fields(input: Readonly<Record<string, unknown>>) {
  const fail = (key: string, wanted: string): never => {
    throw new Difference(`in.${key} is ${JSON.stringify(input[key])}, expected ${wanted}`);
  };
  const read =
    <T>(wanted: string, isWanted: (value: unknown) => boolean) =>
    (key: string): T =>
      isWanted(input[key]) ? (input[key] as T) : fail(key, wanted);
  const isNumber = (value: unknown) => typeof value === "number";
  const isText = (value: unknown) => typeof value === "string";
  const all = (isOne: (value: unknown) => boolean) => (value: unknown) =>
    Array.isArray(value) && value.every(isOne);
  const number = read<number>("a number", isNumber);
  const numbers = read<number[]>("numbers", all(isNumber));
  const names = read<string[]>(
    `kinds of ${[...KINDS.keys()].join(", ")}`,
    all((one) => KINDS.has(one)),
  );
  const present = (key: string) => input[key] !== undefined && input[key] !== null;
  return {
    present,
    number,
    numbers,
    numberOr: (key: string, absent: number) => (present(key) ? number(key) : absent),
    optionalNumber: (key: string) => (present(key) ? number(key) : undefined),
    optionalNumbers: (key: string) => (present(key) ? numbers(key) : undefined),
    string: read<string>("a string", isText),
    strings: read<string[]>("strings", all(isText)),
    boolean: read<boolean>("true or false", (value) => typeof value === "boolean"),
    kinds: (key: string) => names(key).map((one) => KINDS.get(one) as KvCacheKind),
    blockIds: read<BlockIds>("lists of numbers", all(Array.isArray)),
  };
}
