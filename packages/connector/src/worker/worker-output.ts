import type { FailedReceive, WorkerOutput } from "@kv/interface";
import type { ReceiveError } from "./receive-error.js";

/** Options of `WorkerOutputQueue.receiveFailed`. */
export interface ReceiveFailedOptions {
  /** Local blocks whose bytes must not be used. Empty where the cache has several KV cache groups: block ids without a group would be ambiguous. */
  readonly invalidBlockIds: readonly number[];
  /** A peer may still write to the request's blocks; `blocksSafe` follows. Default false. */
  readonly blocksAtRisk?: boolean | undefined;
}

/** Collects a worker's reports until the engine takes them. */
export class WorkerOutputQueue {
  #finishedSending: string[] = [];
  #finishedReceiving: string[] = [];
  #unverifiedReceiving: string[] = [];
  #failedReceiving: FailedReceive[] = [];
  #failedBlockIds = new Set<number>();
  readonly #listeners: (() => void)[] = [];
  readonly #reportsUnverified: boolean;

  /** `cachesUnverifiedKv`: whether KV that no P has compared counts as compared. */
  constructor({ cachesUnverifiedKv }: { readonly cachesUnverifiedKv: boolean }) {
    this.#reportsUnverified = !cachesUnverifiedKv;
  }

  /** P: the request's blocks are no longer needed. */
  sent(requestId: string): void {
    this.#finishedSending.push(requestId);
    this.#progress();
  }

  /**
   * D: the request's KV is in place, or the engine aborted the request and its blocks are free to use. `isVerified`: P has compared the prompts, or
   * nothing of the KV will be used.
   */
  received(requestId: string, isVerified: boolean): void {
    this.#finishedReceiving.push(requestId);
    if (!isVerified && this.#reportsUnverified) this.#unverifiedReceiving.push(requestId);
    this.#progress();
  }

  /** D: the request's KV did not arrive. */
  receiveFailed(
    requestId: string,
    { error, failureType }: ReceiveError,
    { invalidBlockIds, blocksAtRisk = false }: ReceiveFailedOptions,
  ): void {
    this.#finishedReceiving.push(requestId);
    this.#failedReceiving.push({
      requestId,
      code: error.code,
      message: error.message,
      failureType,
      blockIds: invalidBlockIds,
      ...(blocksAtRisk ? { blocksAtRisk } : {}),
    });
    for (const id of invalidBlockIds) this.#failedBlockIds.add(id);
    this.#progress();
  }

  /** D: no peer can write any more to the blocks of a request that failed with `blocksAtRisk`. */
  blocksSafe(requestId: string): void {
    const index = this.#failedReceiving.findIndex((failure) => failure.requestId === requestId);
    if (index < 0) this.#finishedReceiving.push(requestId);
    else {
      // The engine has not seen the failure yet: it is reported once, without the risk.
      const { blocksAtRisk: _, ...failure } = this.#failedReceiving[index] as FailedReceive;
      this.#failedReceiving[index] = failure;
    }
    this.#progress();
  }

  /** Returns all reports since the last call. */
  take(): WorkerOutput {
    const output: WorkerOutput = {
      finishedSending: this.#finishedSending,
      finishedReceiving: this.#finishedReceiving,
      ...(this.#unverifiedReceiving.length === 0 ? {} : { unverifiedReceiving: this.#unverifiedReceiving }),
      failedReceiving: this.#failedReceiving,
      failedBlockIds: [...this.#failedBlockIds],
    };
    this.#finishedSending = [];
    this.#finishedReceiving = [];
    this.#unverifiedReceiving = [];
    this.#failedReceiving = [];
    this.#failedBlockIds = new Set();
    return output;
  }

  /** Adds a listener that is called after each report. */
  onProgress(listener: () => void): void {
    this.#listeners.push(listener);
  }

  /** Requests that the next `take` reports. */
  get size(): number {
    return this.#finishedSending.length + this.#finishedReceiving.length;
  }

  #progress(): void {
    for (const listener of this.#listeners) listener();
  }
}
