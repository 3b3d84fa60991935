import type { FailedReceive, KvError, WorkerOutput } from "@kv/interface";

/** What a worker has to report, until the engine collects it. */
export interface Outbox {
  sent(requestId: string): void;
  received(requestId: string): void;
  /** `blockIds` hold bytes that must not be used. */
  receiveFailed(requestId: string, failure: ReceiveFailure, blockIds: readonly number[]): void;
  /** Of a request that failed with `blocksAtRisk`: nobody can write to its blocks any more. */
  secured(requestId: string): void;
  take(): WorkerOutput;
  /** Called after each of the above. */
  onProgress(listener: () => void): void;
  readonly size: number;
}

export interface ReceiveFailure {
  readonly error: KvError;
  readonly failureType: FailureType;
  /** A peer may write to the request's blocks yet. */
  readonly blocksAtRisk?: boolean;
}

/** vLLM 0.33's `failure_type`; `lease_expired`, which vLLM only counts; and what push says of a peer that did not write. */
export type FailureType =
  | "handshake_failed"
  | "transfer_setup_failed"
  | "transfer_failed"
  | "transfer_exception"
  | "lease_expired"
  | "push_reg_handshake_failed"
  | "push_reg_notif_failed"
  | "push_refused"
  | "push_timed_out";

export function createOutbox(): Outbox {
  let finishedSending: string[] = [];
  let finishedReceiving: string[] = [];
  let failedReceiving: FailedReceive[] = [];
  let failedBlockIds = new Set<number>();
  const listeners: (() => void)[] = [];
  const progress = () => {
    for (const listener of listeners) listener();
  };
  return {
    sent(requestId) {
      finishedSending.push(requestId);
      progress();
    },
    received(requestId) {
      finishedReceiving.push(requestId);
      progress();
    },
    receiveFailed(requestId, { error, failureType, blocksAtRisk = false }, blockIds) {
      finishedReceiving.push(requestId);
      failedReceiving.push({
        requestId,
        code: error.code,
        message: error.message,
        failureType,
        blockIds,
        ...(blocksAtRisk ? { blocksAtRisk } : {}),
      });
      for (const id of blockIds) failedBlockIds.add(id);
      progress();
    },
    secured(requestId) {
      const untold = failedReceiving.findIndex((failure) => failure.requestId === requestId);
      if (untold < 0) finishedReceiving.push(requestId);
      else {
        const { blocksAtRisk: _, ...failure } = failedReceiving[untold] as FailedReceive;
        failedReceiving[untold] = failure;
      }
      progress();
    },
    take() {
      const output: WorkerOutput = {
        finishedSending,
        finishedReceiving,
        failedReceiving,
        failedBlockIds: [...failedBlockIds],
      };
      finishedSending = [];
      finishedReceiving = [];
      failedReceiving = [];
      failedBlockIds = new Set();
      return output;
    },
    onProgress: (listener) => void listeners.push(listener),
    get size() {
      return finishedSending.length + finishedReceiving.length;
    },
  };
}
