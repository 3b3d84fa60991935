import { KvError } from "@kv/interface";
import type { FailureType } from "./worker-output.js";

/** Where a receive broke off; the outbox and the log name it as vLLM does. */
export class ReceiveBroken extends Error {
  constructor(
    readonly error: KvError,
    readonly failureType: FailureType,
  ) {
    super(error.message, { cause: error });
  }
}

/** The error as the engine shall see it; once the request was given up, or its time was over, that is the reason. */
export function receiveBroken(
  error: unknown,
  code: KvError["code"],
  failureType: FailureType,
  signal: AbortSignal,
): ReceiveBroken {
  if (error instanceof ReceiveBroken) return error;
  const reason: unknown = signal.aborted ? signal.reason : error;
  return new ReceiveBroken(KvError.from(reason, code, "a receive failed"), failureType);
}
