import { expectError } from "@kv/conformance/expect-error";
import type { KvError, KvErrorCode } from "@kv/interface";

/** Expects that a call ends in a `KvError` with this code. */
export const refused = (
  call: Promise<unknown> | (() => unknown),
  code: KvErrorCode,
): Promise<KvError> => expectError(typeof call === "function" ? call : () => call, code);
