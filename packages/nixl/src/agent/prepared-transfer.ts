import { KvError, type TransferOrder, type TransferRequest } from "@kv/interface";
import { requireOptions } from "../validate.js";
import type { NixlTransfer } from "./transfers.js";

/** Options of one post of a prepared transfer. */
export type PostOptions = Pick<TransferOrder, "notification" | "signal" | "timeoutMs">;

export interface PreparedTransferParts {
  /** Throws as `Agent.transfer`. */
  post(order: TransferOrder): NixlTransfer;
  backend(): Promise<string>;
  close(): Promise<void>;
}

/**
 * A transfer whose NIXL requests are made once and posted many times (NIXL: `makeXferReq`, then
 * `postXferReq`). Each post moves the same descriptors with their bytes of that moment. One post is
 * under way at a time.
 */
export class PreparedTransfer implements AsyncDisposable {
  readonly #request: TransferRequest;
  readonly #parts: PreparedTransferParts;
  #underWay = false;
  #closed: Promise<void> | undefined;

  constructor(request: TransferRequest, parts: PreparedTransferParts) {
    this.#request = request;
    this.#parts = parts;
  }

  /**
   * Posts the requests, after making anew those that failed in an earlier post. Throws
   * `KV_TRANSFER_INVALID` for wrong options and until the last post is released, and
   * `KV_LIST_CLOSED` once this is closed; every other error rejects `done`.
   */
  readonly post = (options: PostOptions = {}): NixlTransfer => {
    requireOptions(options, "KV_TRANSFER_INVALID", "the options of post", [
      "notification",
      "signal",
      "timeoutMs",
    ]);
    const { operation, local, remote } = this.#request;
    if (this.#closed !== undefined)
      throw new KvError("KV_LIST_CLOSED", "the prepared transfer is closed");
    if (this.#underWay) {
      throw new KvError("KV_TRANSFER_INVALID", "the prepared transfer is under way already", {
        hint: "await `released` of the last post, or prepare it twice",
      });
    }
    const transfer = this.#parts.post({ operation, local, remote, ...options });
    this.#underWay = true;
    void transfer.released.then(() => {
      this.#underWay = false;
    });
    return transfer;
  };

  /**
   * The backend that NIXL has chosen (NIXL: `queryXferBackend`), such as "UCX"; empty where NIXL
   * does not say. Rejects with `KV_TRANSFER_INVALID` while a post is under way and after a failed
   * one, and with `KV_LIST_CLOSED` once this is closed.
   */
  readonly backend = (): Promise<string> => this.#parts.backend();

  /** Waits for the post that is under way, then releases the requests. Safe to call twice. */
  readonly close = (): Promise<void> => {
    this.#closed ??= this.#parts.close();
    return this.#closed;
  };

  readonly [Symbol.asyncDispose] = (): Promise<void> => this.close();
}
