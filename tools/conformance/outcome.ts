import { KvError } from "@kv/interface";
import { BEYOND_RULES, STRICTER_RULES } from "./beyond.js";

/** A line of a vector file. */
export interface VectorCase {
  readonly in: Readonly<Record<string, unknown>>;
  readonly out?: unknown;
  readonly error?: { readonly type: string; readonly msg: string };
}

/** Runs our functions on the input. Returns the result to compare; may throw a `Difference`. */
export type Replay = (input: VectorCase["in"], expected: unknown) => unknown;

export type Outcome =
  | { readonly kind: "passed"; readonly refused?: string; readonly stricter?: string }
  | { readonly kind: "beyond"; readonly rule: string }
  | { readonly kind: "failed"; readonly reason: string };

/** Our result differs from vLLM's, or a case cannot be handled. */
export class Difference extends Error {}

export function judge(family: string, replay: Replay, vector: VectorCase): Outcome {
  let ours: unknown;
  try {
    ours = replay(vector.in, vector.out);
  } catch (error) {
    if (!KvError.is(error)) return { kind: "failed", reason: describe(error) };
    if (vector.error !== undefined) return { kind: "passed" };
    const rule = STRICTER_RULES.find((one) => {
      return one.family === family && one.refusal.test(error.message) && one.matches(vector.in);
    });
    if (rule !== undefined) return { kind: "passed", stricter: rule.name };
    return { kind: "failed", reason: `vLLM works, we refuse with ${error.code}: ${error.message}` };
  }
  if (vector.error !== undefined) {
    const { msg } = vector.error;
    const rule = BEYOND_RULES.find((one) => {
      return one.family === family && one.refusal.test(msg) && one.matches(vector.in);
    });
    if (rule !== undefined) return { kind: "beyond", rule: rule.name };
    return {
      kind: "failed",
      reason: `vLLM refuses (${vector.error.type}: ${vector.error.msg}), we work`,
    };
  }
  const difference = firstDifference(ours, vector.out, "out");
  return difference === undefined ? { kind: "passed" } : { kind: "failed", reason: difference };
}

/** Typed arrays count as arrays. */
export function firstDifference(ours: unknown, theirs: unknown, path: string): string | undefined {
  if (ArrayBuffer.isView(ours)) return firstDifference([...(ours as Int32Array)], theirs, path);
  if (Array.isArray(ours) && Array.isArray(theirs)) {
    if (ours.length !== theirs.length)
      return `${path}: ${ours.length} elements, vLLM has ${theirs.length}`;
    for (const [index, value] of ours.entries()) {
      const found = firstDifference(value, theirs[index], `${path}[${index}]`);
      if (found !== undefined) return found;
    }
    return undefined;
  }
  if (isRecord(ours) && isRecord(theirs)) {
    for (const key of new Set([...Object.keys(ours), ...Object.keys(theirs)])) {
      const found = firstDifference(ours[key], theirs[key], `${path}.${key}`);
      if (found !== undefined) return found;
    }
    return undefined;
  }
  return Object.is(ours, theirs)
    ? undefined
    : `${path}: ${JSON.stringify(ours)}, vLLM has ${JSON.stringify(theirs)}`;
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function describe(error: unknown): string {
  if (error instanceof Difference) return error.message;
  return error instanceof Error ? (error.stack ?? error.message) : String(error);
}
