import { inspect } from "node:util";
import { KvError, type KvErrorCode, nearestName } from "@kv/interface";

/** A longer timer of Node ends at once. */
export const MAX_TIMER_MS = 2 ** 31 - 1;

/** Prints also what JSON cannot: bigints, symbols, cycles. */
export const formatValue = (value: unknown): string =>
  typeof value === "string" ? JSON.stringify(value) : inspect(value, { depth: 0 });

/** Throws `code`, for callers that no compiler has checked. */
export function requireObject(value: unknown, code: KvErrorCode, name: string): void {
  if (typeof value === "object" && value !== null) return;
  throw new KvError(code, `${name} is ${formatValue(value)}, not an object`);
}

/** Throws `code` unless `value` is an object whose members are all `known`. */
export function requireOptions<T extends object>(
  value: T,
  code: KvErrorCode,
  name: string,
  known: readonly (keyof T & string)[],
): void {
  requireObject(value, code, name);
  for (const key in value) {
    if (known.includes(key)) continue;
    const nearest = nearestName(key, known);
    throw new KvError(code, `${name}: there is no ${formatValue(key)}`, {
      hint:
        nearest === undefined
          ? `there are ${known.toSorted().join(", ")}`
          : `did you mean ${nearest}?`,
    });
  }
}

/**
 * `timeoutMs` plus `addedMs`; undefined for no limit (undefined or Infinity). Throws `code` for
 * NaN, negative numbers and other types.
 */
export function timerMs(
  timeoutMs: number | undefined,
  code: KvErrorCode,
  addedMs = 0,
): number | undefined {
  if (timeoutMs === undefined || timeoutMs === Number.POSITIVE_INFINITY) return undefined;
  if (!(typeof timeoutMs === "number" && timeoutMs >= 0)) {
    throw new KvError(code, `timeoutMs is ${formatValue(timeoutMs)}, not a number from 0 on`);
  }
  return Math.min(timeoutMs + addedMs, MAX_TIMER_MS);
}
