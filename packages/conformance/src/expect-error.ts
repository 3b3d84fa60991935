import { KvError, type KvErrorCode } from "@kv/interface";
import { expect } from "vitest";

/** Expects a `KvError` with one of the codes and a message of some length. */
export async function expectError(act: () => unknown, ...codes: KvErrorCode[]): Promise<KvError> {
  let outcome: unknown;
  try {
    outcome = await act();
  } catch (error) {
    return checkError(error, codes);
  }
  return expect.fail(`expected ${codes.join(" or ")}, got the value ${String(outcome)}`);
}

/** As `expectError`, for a synchronous throw. */
export function expectThrown(act: () => unknown, ...codes: KvErrorCode[]): KvError {
  try {
    act();
  } catch (error) {
    return checkError(error, codes);
  }
  return expect.fail(`expected ${codes.join(" or ")} to be thrown synchronously`);
}

function checkError(error: unknown, codes: readonly KvErrorCode[]): KvError {
  if (!KvError.is(error)) throw error;
  expect(codes).toContain(error.code);
  expect(error.message.length).toBeGreaterThan(10);
  return error;
}
