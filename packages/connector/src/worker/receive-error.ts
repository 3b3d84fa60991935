import { KvError } from "@kv/interface";

/**
 * vLLM 0.33's `failure_type` values, then `lease_expired`, which vLLM only counts, and this
 * project's own types.
 */
export type FailureType =
  | "handshake_failed"
  | "transfer_setup_failed"
  | "transfer_failed"
  | "transfer_exception"
  | "push_reg_handshake_failed"
  | "push_reg_notif_failed"
  | "lease_expired"
  /** Pull: P did not answer whether it still held the blocks that were read. */
  | "lease_query_failed"
  /** Pull: P has computed another prompt. */
  | "prompt_mismatch"
  /** Push: P sent a notice that it will not write. */
  | "push_refused"
  /** Push: P did not write in time. */
  | "push_timed_out";

/** Why a request's KV did not arrive: the error, and the step that failed, by vLLM's name. */
export class ReceiveError extends Error {
  constructor(
    readonly error: KvError,
    readonly failureType: FailureType,
  ) {
    super(error.message, { cause: error });
  }

  /**
   * Wraps any error of a receive. A `ReceiveError` is returned unchanged. Once the signal has
   * aborted, its reason replaces the error: the request was aborted or reached its deadline. `code`
   * is for errors that are not a `KvError`.
   */
  static from(
    error: unknown,
    code: KvError["code"],
    failureType: FailureType,
    signal: AbortSignal,
  ): ReceiveError {
    if (error instanceof ReceiveError) return error;
    const reason = signal.aborted ? signal.reason : withoutAddress(error);
    return new ReceiveError(KvError.from(reason, code, "a receive failed"), failureType);
  }
}

/** Options of `WorkerOutputQueue.receiveFailed`. */
export interface ReceiveFailedOptions {
  /**
   * Local blocks whose bytes must not be used. Empty where the cache has several KV cache groups:
   * block ids without a group would be ambiguous.
   */
  readonly invalidBlockIds: readonly number[];
  /** A peer may still write to the request's blocks; `blocksSafe` follows. @default false */
  readonly blocksAtRisk?: boolean | undefined;
}

/** Errors that say what is at an address. */
const ABOUT_THE_ADDRESS: readonly KvError["code"][] = [
  "KV_SIDE_CHANNEL_UNREACHABLE",
  "KV_SIDE_CHANNEL_TIMEOUT",
  "KV_WIRE_MALFORMED",
  "KV_WIRE_LIMIT_EXCEEDED",
];

/**
 * What a client may know of the address in its parameters: the same whether nothing listens there,
 * another program does, or nothing answers. Otherwise D would be a port scanner for its clients.
 * The log has the details.
 */
function withoutAddress(error: unknown): unknown {
  if (KvError.is(error, "KV_HANDSHAKE_BACKED_OFF")) {
    return new KvError(
      "KV_HANDSHAKE_BACKED_OFF",
      "the worker that kv_transfer_params name has failed before and is not tried again yet",
      {
        hint: "the log of the worker that answers says why; send the prompt to another prefill worker",
      },
    );
  }
  if (!KvError.is(error) || !ABOUT_THE_ADDRESS.includes(error.code)) return error;
  return new KvError(
    "KV_SIDE_CHANNEL_UNREACHABLE",
    "the worker that kv_transfer_params name does not answer",
    {
      hint: "the log of the worker that answers says why; send the prompt to a prefill worker again",
    },
  );
}
