import { KvError } from "@kv/interface";

/** vLLM 0.33's `failure_type`; then `lease_expired`, which vLLM only counts, and the types of this project. */
export type FailureType =
  | "handshake_failed"
  | "transfer_setup_failed"
  | "transfer_failed"
  | "transfer_exception"
  | "push_reg_handshake_failed"
  | "push_reg_notif_failed"
  | "lease_expired"
  /** Pull: P could not be asked whether it had kept the blocks that were read. */
  | "lease_query_failed"
  /** Push: P answered that it does not write. */
  | "push_refused"
  /** Push: P did not write in time. */
  | "push_timed_out";

/** Why a request's KV did not arrive: the error, and at which step, under vLLM's name. */
export class ReceiveError extends Error {
  constructor(
    /** The error that the engine gets. */
    readonly error: KvError,
    /** The step that failed. */
    readonly failureType: FailureType,
  ) {
    super(error.message, { cause: error });
  }

  /**
   * Wraps any error of a receive. A `ReceiveError` is returned as it is. Once the signal has aborted, its reason stands in for the error: the
   * request was given up or its time had run out. `code` is for errors that are no `KvError`.
   */
  static from(
    error: unknown,
    code: KvError["code"],
    failureType: FailureType,
    signal: AbortSignal,
  ): ReceiveError {
    if (error instanceof ReceiveError) return error;
    const reason: unknown = signal.aborted ? signal.reason : error;
    return new ReceiveError(KvError.from(reason, code, "a receive failed"), failureType);
  }
}
