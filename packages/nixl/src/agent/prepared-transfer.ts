import { KvError, type TransferOrder, type TransferRequest } from "@kv/interface";
import { requireObject } from "../validate.js";
import type { NixlTransfer } from "./transfers.js";

/** Options of one post of a prepared transfer. */
export type PostOptions = Pick<TransferOrder, "notification" | "signal" | "timeoutMs">;

/** NIXL's estimate of what a transfer takes (NIXL: `estimateXferCost`). */
export interface CostEstimate {
  /** Microseconds from the post to the last byte. */
  readonly durationUs: number;
  /** Microseconds by which the estimate may be wrong. */
  readonly marginUs: number;
  /**
   * "backend": the backend has a model of its links. "unknown": it has none, and the numbers say
   * nothing.
   */
  readonly method: "backend" | "unknown";
}

/** What a prepared transfer needs of its agent. */
export interface PreparedTransferParts {
  /** Posts the requests. Throws as `Agent.transfer`. */
  post(order: TransferOrder): NixlTransfer;
  /** Asks NIXL for its estimate. */
  estimate(): Promise<[durationUs: number, marginUs: number, known: number]>;
  /** Releases the requests. */
  close(): Promise<void>;
}

/**
 * A transfer whose NIXL requests are made once and posted many times (NIXL: `makeXferReq`, then
 * `postXferReq` again and again). It moves the same descriptors each time, and the bytes that are
 * there at the time of the post. One post is under way at a time.
 */
export class PreparedTransfer implements AsyncDisposable {
  readonly #request: TransferRequest;
  readonly #parts: PreparedTransferParts;
  #underWay = false;
  #closed: Promise<void> | undefined;

  /** For `NixlAgent.prepareTransfer`. */
  constructor(request: TransferRequest, parts: PreparedTransferParts) {
    this.#request = request;
    this.#parts = parts;
  }

  /**
   * Posts the requests. A request that failed in an earlier post is made again. Throws
   * `KV_TRANSFER_INVALID` for wrong options and until the last post is released, and
   * `KV_LIST_CLOSED` once this is closed; every other error rejects `done`.
   */
  readonly post = (options: PostOptions = {}): NixlTransfer => {
    requireObject(options, "KV_TRANSFER_INVALID", "the options of post");
    const { operation, local, remote } = this.#request;
    if (this.#closed !== undefined)
      throw new KvError("KV_LIST_CLOSED", "the prepared transfer is closed");
    if (this.#underWay) {
      throw new KvError("KV_TRANSFER_INVALID", "the prepared transfer is under way already", {
        hint: "await `released` of the last post, or prepare it twice",
      });
    }
    const { notification, signal, timeoutMs } = options;
    const transfer = this.#parts.post({
      operation,
      local,
      remote,
      notification,
      signal,
      timeoutMs,
    });
    this.#underWay = true;
    void transfer.released.then(() => {
      this.#underWay = false;
    });
    return transfer;
  };

  /**
   * NIXL's estimate of what one post takes. Rejects with `KV_TRANSFER_INVALID` while a post is
   * under way or after one failed, and with `KV_TRANSFER_FAILED` where the backend refuses.
   */
  readonly estimateCost = async (): Promise<CostEstimate> => {
    const [durationUs, marginUs, known] = await this.#parts.estimate();
    return { durationUs, marginUs, method: known === 1 ? "backend" : "unknown" };
  };

  /**
   * Waits for the post that is under way, then releases the requests. Closing twice is one call.
   */
  readonly close = (): Promise<void> => {
    this.#closed ??= this.#parts.close();
    return this.#closed;
  };

  /** The same as `close()`. */
  readonly [Symbol.asyncDispose] = (): Promise<void> => this.close();
}
