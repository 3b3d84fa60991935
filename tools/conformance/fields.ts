import type { BlockIds, KvCacheKind } from "@kv/interface";
import { Difference } from "./outcome.js";

/** The vector generator's name of each kind of group, and ours. */
const KINDS: ReadonlyMap<unknown, KvCacheKind> = new Map([
  ["full", "full"],
  ["mla", "mla"],
  ["swa", "swa"],
  ["mamba", "mamba"],
  ["circ", "circular"],
]);

/** Reads the fields of a vector's input. A field of an unexpected type fails the case. */
export function fields(input: Readonly<Record<string, unknown>>) {
  const fail = (key: string, wanted: string): never => {
    throw new Difference(`in.${key} is ${JSON.stringify(input[key])}, expected ${wanted}`);
  };
  const number = (key: string): number => {
    const value = input[key];
    return typeof value === "number" ? value : fail(key, "a number");
  };
  const numbers = (key: string): number[] => {
    const value = input[key];
    return Array.isArray(value) && value.every((one) => typeof one === "number")
      ? value
      : fail(key, "numbers");
  };
  const present = (key: string) => input[key] !== undefined && input[key] !== null;
  return {
    present,
    number,
    numbers,
    numberOr: (key: string, absent: number) => (present(key) ? number(key) : absent),
    optionalNumber: (key: string) => (present(key) ? number(key) : undefined),
    optionalNumbers: (key: string) => (present(key) ? numbers(key) : undefined),
    string: (key: string): string => {
      const value = input[key];
      return typeof value === "string" ? value : fail(key, "a string");
    },
    strings: (key: string): string[] => {
      const value = input[key];
      return Array.isArray(value) && value.every((one) => typeof one === "string")
        ? value
        : fail(key, "strings");
    },
    boolean: (key: string): boolean => {
      const value = input[key];
      return typeof value === "boolean" ? value : fail(key, "true or false");
    },
    kinds: (key: string): KvCacheKind[] => {
      const value = input[key];
      const wanted = `kinds of ${[...KINDS.keys()].join(", ")}`;
      if (!Array.isArray(value)) return fail(key, wanted);
      return value.map((one) => KINDS.get(one) ?? fail(key, wanted));
    },
    blockIds: (key: string): BlockIds => {
      const value = input[key];
      return Array.isArray(value) && value.every(Array.isArray)
        ? (value as number[][])
        : fail(key, "lists of numbers");
    },
  };
}
