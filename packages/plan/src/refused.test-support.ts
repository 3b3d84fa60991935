import { KvError, type KvErrorCode } from "@kv/interface";
import { expect } from "vitest";

/** The error with which something is refused. */
export function refusal(attempt: () => unknown): KvError {
  try {
    attempt();
  } catch (error) {
    if (KvError.is(error)) return error;
    throw error;
  }
  return expect.fail("nothing was refused");
}

/** The message of a refusal with this code; undefined where nothing is refused. */
export function why(
  attempt: () => unknown,
  code: KvErrorCode = "KV_PLAN_UNSUPPORTED",
): string | undefined {
  try {
    attempt();
  } catch (error) {
    if (KvError.is(error, code)) return error.message;
    throw error;
  }
  return undefined;
}

/** Requires a refusal with this code and this message. */
export function refused(attempt: () => unknown, code: KvErrorCode, message: string): void {
  const error = refusal(attempt);
  expect(error.message).toContain(message);
  expect(error.code).toBe(code);
}
