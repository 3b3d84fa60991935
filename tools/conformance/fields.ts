import type { BlockIds, KvCacheKind } from "@kv/interface";
import { Difference } from "./outcome.js";

/** Reads the fields of a vector's input; a field of another type fails the case, since it is one that we cannot handle. */
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
      const known = ["full", "mla", "swa", "mamba"];
      const valid = Array.isArray(value) && value.every((one) => known.includes(one as string));
      return valid ? (value as KvCacheKind[]) : fail(key, `kinds of ${known.join(", ")}`);
    },
    blockIds: (key: string): BlockIds => {
      const value = input[key];
      return Array.isArray(value) && value.every(Array.isArray)
        ? (value as number[][])
        : fail(key, "lists of numbers");
    },
  };
}
