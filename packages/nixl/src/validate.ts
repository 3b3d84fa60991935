import { inspect } from "node:util";
import { KvError, type KvErrorCode } from "@kv/interface";

/**
 * A caller's value as text for an error message. Also for what JSON cannot print: bigints, symbols,
 * cycles.
 */
export const formatValue = (value: unknown): string =>
  typeof value === "string" ? JSON.stringify(value) : inspect(value, { depth: 0 });

/**
 * For callers whose types no compiler has checked. Throws `code` unless `value` is an object;
 * `name` says in the message which value it is.
 */
export function requireObject(value: unknown, code: KvErrorCode, name: string): void {
  if (typeof value === "object" && value !== null) return;
  throw new KvError(code, `${name} is ${formatValue(value)}, not an object`);
}
