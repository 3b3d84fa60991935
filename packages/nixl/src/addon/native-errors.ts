import { KV_ERROR_CODES, KvError, type KvErrorCode } from "@kv/interface";

const CODES: ReadonlySet<string> = new Set(KV_ERROR_CODES);

/** Makes a `KvError` of the addon's plain errors. Unknown codes become `KV_INTERNAL`. */
export function fromNative(error: unknown): KvError {
  if (KvError.is(error)) return error;
  const { code, message, hint } = error as { code?: string; message?: string; hint?: string };
  const known = CODES.has(code ?? "") ? (code as KvErrorCode) : "KV_INTERNAL";
  return new KvError(known, message ?? String(error), { hint });
}

/** Throws the addon's errors as `KvError`s. */
export function callNative<T>(call: () => T): T {
  try {
    return call();
  } catch (error) {
    throw fromNative(error);
  }
}
