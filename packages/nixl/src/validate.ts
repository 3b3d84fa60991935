import { inspect } from "node:util";
import { KvError, type KvErrorCode } from "@kv/interface";

/** What a caller gave, for an error. JSON has no text for a bigint, nor for what contains itself. */
export const shown = (value: unknown): string =>
  typeof value === "string" ? JSON.stringify(value) : inspect(value, { depth: 0 });

/** For callers that no compiler has checked. Errors: `code`, where the value is not an object with properties to read. */
export function requireObject(value: unknown, code: KvErrorCode, what: string): void {
  if (typeof value === "object" && value !== null) return;
  throw new KvError(code, `${what} is ${shown(value)}, not an object`);
}
