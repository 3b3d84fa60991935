import {
  KvError,
  type KvErrorCode,
  type Timer,
  type Transfer,
  type TransferRequest,
  type TransferResult,
} from "@kv/interface";
import type { PreparedListRecord } from "../agent/prepared-lists.js";
import { type Deferred, deferred } from "../deferred.js";
import type { AgentEndpoint, PeerAddress } from "../network/endpoints.js";
import type { Fabric } from "../network/fabric.js";
import { type CopyPlan, copyPlan } from "./copy-plan.js";
import { PacedCopy } from "./paced-copy.js";

export interface TransferCounters {
  transfersPosted: number;
  transfersDone: number;
  transfersFailed: number;
  bytesTransferred: number;
  notificationsSent: number;
}

/** The transfers of one agent. */
export class AgentTransfers {
  readonly fabric: Fabric;
  readonly self: AgentEndpoint;
  readonly counters: TransferCounters;
  readonly #active = new Set<ActiveTransfer>();

  constructor(fabric: Fabric, self: AgentEndpoint, counters: TransferCounters) {
    this.fabric = fabric;
    this.self = self;
    this.counters = counters;
  }

  get inFlight(): number {
    return this.#active.size;
  }

  /**
   * Checks the request and starts the transfer.
   *
   * @throws `KV_TRANSFER_INVALID`.
   */
  start(
    request: TransferRequest,
    local: PreparedListRecord,
    remote: PreparedListRecord,
    peer: PeerAddress,
  ): Transfer {
    requireValidOptions(request);
    const plan = copyPlan(
      request,
      { name: "local", rows: local.rows },
      { name: "remote", rows: remote.rows },
    );
    const transfer = new ActiveTransfer(this, request, plan, peer);
    const released = transfer.released.promise;
    this.#active.add(transfer);
    local.users.add(released);
    remote.users.add(released);
    transfer.start(() => {
      this.#active.delete(transfer);
      local.users.delete(released);
      remote.users.delete(released);
      transfer.released.resolve();
    });
    return { done: transfer.done.promise, released };
  }

  abortAll(reason: string): void {
    for (const transfer of [...this.#active]) {
      transfer.abort("KV_TRANSFER_ABORTED", `was aborted: ${reason}`);
    }
  }

  /** Resolves when all transfers that are in flight now are released. */
  async allReleased(): Promise<void> {
    await Promise.all([...this.#active].map((transfer) => transfer.released.promise));
  }

  /** Stops all transfers without settling them, because their process is gone. */
  halt(): void {
    for (const transfer of this.#active) transfer.halt();
    this.#active.clear();
  }
}

class ActiveTransfer {
  readonly done: Deferred<TransferResult> = deferred();
  readonly released: Deferred<void> = deferred();
  readonly #agent: AgentTransfers;
  readonly #request: TransferRequest;
  readonly #plan: CopyPlan;
  readonly #peer: PeerAddress;
  readonly #notification: Uint8Array | undefined;
  readonly #startedMs: number;
  readonly #onAbort = () =>
    this.abort("KV_TRANSFER_ABORTED", "was aborted by its signal", this.#request.signal?.reason);
  #settled = false;
  #timer: Timer | undefined;
  #copy: PacedCopy | undefined;

  constructor(agent: AgentTransfers, request: TransferRequest, plan: CopyPlan, peer: PeerAddress) {
    this.#agent = agent;
    this.#request = request;
    this.#plan = plan;
    this.#peer = peer;
    this.#notification = request.notification?.slice();
    this.#startedMs = agent.self.host.clock.now();
    agent.counters.transfersPosted += 1;
    // A caller that waits for `released` alone must not cause an unhandled rejection.
    this.done.promise.catch(() => {});
  }

  start(release: () => void): void {
    const { fabric, self } = this.#agent;
    const { signal, timeoutMs, operation } = this.#request;
    if (signal?.aborted) {
      this.#onAbort();
      release();
      return;
    }
    signal?.addEventListener("abort", this.#onAbort);
    if (timeoutMs !== undefined) {
      this.#timer = self.host.clock.setTimer(
        () => this.abort("KV_TRANSFER_TIMEOUT", `did not end within ${timeoutMs} ms`),
        timeoutMs,
        { ref: true },
      );
    }
    this.#copy = new PacedCopy({
      fabric,
      from: self,
      to: this.#peer,
      operation,
      plan: this.#plan,
      released: release,
      failed: (error) => this.#fail(error),
      landed: () => this.#landed(),
    });
    this.#copy.start();
  }

  abort(code: KvErrorCode, reason: string, cause?: unknown): void {
    const { operation } = this.#request;
    const subject = `${operation} of ${this.#plan.descriptorCount} descriptors with agent ${this.#peer.name}`;
    this.#fail(new KvError(code, `${subject} ${reason}`, { cause }));
    this.#copy?.abort();
  }

  halt(): void {
    this.#copy?.halt();
  }

  #landed(): void {
    if (!this.#markSettled()) return;
    const { fabric, self, counters } = this.#agent;
    const notification = this.#notification;
    const error =
      notification && fabric.post({ from: self, to: this.#peer, payload: notification });
    if (error !== undefined) {
      counters.transfersFailed += 1;
      this.done.reject(error);
      return;
    }
    const { lengthBytes, descriptorCount, mergedCount } = this.#plan;
    counters.transfersDone += 1;
    counters.bytesTransferred += lengthBytes;
    if (notification !== undefined) counters.notificationsSent += 1;
    const transferMs = self.host.clock.now() - this.#startedMs;
    this.done.resolve({ lengthBytes, descriptorCount, mergedCount, postMs: 0, transferMs });
  }

  #fail(error: KvError): void {
    if (!this.#markSettled()) return;
    this.#agent.counters.transfersFailed += 1;
    this.done.reject(error);
  }

  /** Returns false when `done` is settled already. */
  #markSettled(): boolean {
    if (this.#settled) return false;
    this.#settled = true;
    this.#timer?.cancel();
    this.#request.signal?.removeEventListener("abort", this.#onAbort);
    return true;
  }
}

function requireValidOptions({ operation, timeoutMs, notification }: TransferRequest): void {
  if (operation !== "READ" && operation !== "WRITE")
    throw invalid(`operation ${String(operation)}`);
  if (timeoutMs !== undefined && !(timeoutMs > 0 && timeoutMs < 2 ** 31)) {
    throw invalid(`timeoutMs ${timeoutMs}`);
  }
  if (notification !== undefined && !(notification instanceof Uint8Array)) {
    throw invalid("the notification is not a Uint8Array");
  }
}

function invalid(message: string): KvError {
  return new KvError("KV_TRANSFER_INVALID", `invalid transfer: ${message}`);
}
