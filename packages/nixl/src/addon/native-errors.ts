import { KV_ERROR_CODES, KvError, type KvErrorCode } from "@kv/interface";

const CODES: ReadonlySet<string> = new Set(KV_ERROR_CODES);

/**
 * Makes a `KvError` of an error of the addon, which is a plain one with `code` and `hint`. Unknown
 * codes become `KV_INTERNAL`.
 */
export function fromNative(error: unknown): KvError {
  if (KvError.is(error)) return error;
  const { code, message, hint } = error as { code?: unknown; message?: unknown; hint?: unknown };
  const known = typeof code === "string" && CODES.has(code) ? (code as KvErrorCode) : "KV_INTERNAL";
  return new KvError(known, String(message ?? error), typeof hint === "string" ? { hint } : {});
}

/** Calls into the addon. Throws the addon's errors as `KvError`s. */
export function callNative<T>(call: () => T): T {
  try {
    return call();
  } catch (error) {
    throw fromNative(error);
  }
}
