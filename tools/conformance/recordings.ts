import { existsSync, readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { Difference, firstDifference } from "./outcome.js";

export type Recorded = Readonly<Record<string, unknown>>;

export function readRecords(path: string): Recorded[] {
  return readFileSync(path, "utf8")
    .split("\n")
    .filter((line) => line.trim() !== "")
    .map((line) => JSON.parse(line) as Recorded);
}

/** Sorted; none when the folder does not exist. */
export function filesEnding(folder: string, ending: string): string[] {
  if (!existsSync(folder)) return [];
  return readdirSync(folder)
    .filter((name) => name.endsWith(ending))
    .sort()
    .map((name) => join(folder, name));
}

export function record(value: unknown, what: string): Recorded {
  if (typeof value === "object" && value !== null && !Array.isArray(value))
    return value as Recorded;
  throw new Difference(`${what} is ${JSON.stringify(value)}, expected a map`);
}

export function same(what: string, ours: unknown, theirs: unknown): void {
  const difference = firstDifference(ours, theirs, what);
  if (difference !== undefined) throw new Difference(difference);
}

export function hex(bytes: Uint8Array): string {
  return Buffer.from(bytes).toString("hex");
}
