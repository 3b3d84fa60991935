import {
  KvError,
  type KvErrorCode,
  type Timer,
  type Transfer,
  type TransferRequest,
  type TransferResult,
} from "@kv/interface";
import type { PreparedListRecord } from "../agent/prepared-lists.js";
import { deferred } from "../deferred.js";
import { delayOf, type FaultRule } from "../network/fault-plan.js";
import { pieceLength } from "../network/latency.js";
import type { AgentEndpoint, Fabric, InFlightTransfer, PeerAddress } from "../network/network.js";
import { type CopyPlan, copyPlan } from "./copy-plan.js";

export interface TransferCounters {
  transfersPosted: number;
  transfersDone: number;
  transfersFailed: number;
  bytesTransferred: number;
  notificationsSent: number;
}

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

  /** @throws `KV_TRANSFER_INVALID`. */
  start(
    request: TransferRequest,
    local: PreparedListRecord,
    remote: PreparedListRecord,
    peer: PeerAddress,
  ): Transfer {
    requireValidOptions(request);
    const sides = [
      { name: "local", rows: local.rows },
      { name: "remote", rows: remote.rows },
    ] as const;
    const transfer = new ActiveTransfer(this, request, copyPlan(request, ...sides), peer);
    const { promise: done } = transfer.done;
    const { promise: released } = transfer.released;
    this.#active.add(transfer);
    local.users.add(released);
    remote.users.add(released);
    transfer.start(() => {
      this.#active.delete(transfer);
      local.users.delete(released);
      remote.users.delete(released);
      transfer.released.resolve();
    });
    return { done, released };
  }

  abortAll(reason: string): void {
    for (const transfer of [...this.#active])
      transfer.abort("KV_TRANSFER_ABORTED", `was aborted: ${reason}`);
  }

  async allReleased(): Promise<void> {
    await Promise.all([...this.#active].map(({ released }) => released.promise));
  }

  halt(): void {
    for (const transfer of this.#active) transfer.halt();
    this.#active.clear();
  }
}

/**
 * Copies one transfer in pieces over time. After a failure or abort it writes for `lingerMs` until
 * its release, so that tests see memory that was reused too early.
 */
class ActiveTransfer implements InFlightTransfer {
  readonly from: AgentEndpoint;
  readonly to: PeerAddress;
  readonly done = deferred<TransferResult>();
  readonly released = deferred<void>();
  readonly #fabric: Fabric;
  readonly #counters: TransferCounters;
  readonly #request: TransferRequest;
  readonly #plan: CopyPlan;
  readonly #notification: Uint8Array | undefined;
  readonly #startedMs: number;
  readonly #pieceBytes: number;
  readonly #pieces: number;
  readonly #onAbort = () =>
    this.abort("KV_TRANSFER_ABORTED", "was aborted by its signal", this.#request.signal?.reason);
  #release = () => {};
  #rule: FaultRule | undefined;
  /** A fault stops the copy before this piece; the number of pieces for no fault. */
  #stopsBefore: number;
  #landedPieces = 0;
  #state: "active" | "lingering" | "released" = "active";
  #isSettled = false;
  readonly #timers: Partial<Record<"timeout" | "piece" | "linger", Timer>> = {};

  constructor(
    { fabric, self, counters }: AgentTransfers,
    request: TransferRequest,
    plan: CopyPlan,
    peer: PeerAddress,
  ) {
    this.from = self;
    this.to = peer;
    this.#fabric = fabric;
    this.#counters = counters;
    this.#request = request;
    this.#plan = plan;
    this.#notification = request.notification?.slice();
    this.#startedMs = self.host.clock.now();
    this.#pieceBytes = pieceLength(plan.lengthBytes, fabric.latency);
    this.#pieces = Math.ceil(plan.lengthBytes / this.#pieceBytes);
    this.#stopsBefore = this.#pieces;
    counters.transfersPosted += 1;
    this.done.promise.catch(() => {});
  }

  /** `release` is called once, after the last byte. */
  start(release: () => void): void {
    this.#release = release;
    const { from, to } = this;
    const fabric = this.#fabric;
    const { signal, timeoutMs, operation } = this.#request;
    if (signal?.aborted) {
      this.#fail(this.#error("KV_TRANSFER_ABORTED", "was aborted by its signal", signal.reason));
      this.#end();
      return;
    }
    signal?.addEventListener("abort", this.#onAbort);
    if (timeoutMs !== undefined) {
      this.#timers.timeout = from.host.clock.setTimer(
        () => this.abort("KV_TRANSFER_TIMEOUT", `did not end within ${timeoutMs} ms`),
        timeoutMs,
        { ref: true },
      );
    }
    const rule = fabric.faults.decide({
      operation,
      from: from.host.name,
      fromAgent: from.name,
      to: to.host,
      toAgent: to.name,
      lengthBytes: this.#plan.lengthBytes,
    });
    this.#rule = rule;
    if (rule?.fault === "drop" || rule?.fault === "fail")
      this.#stopsBefore = fabric.random.integer(this.#pieces);
    fabric.transfers.add(this);
    if (rule?.fault === "disconnect") fabric.disconnect(from.host.name, to.host, rule);
    if (this.#state !== "active") return;
    if (fabric.isCut(from.host.name, to.host)) this.lostPeer("the hosts are disconnected");
    else if (!fabric.agents.has(to.incarnation)) this.lostPeer("the peer is gone");
    else {
      const { rangeMs, sharesBandwidth } = fabric.latency;
      const delayMs =
        fabric.drawLatencyMs() + rangeMs * this.#plan.mergedCount + delayOf(rule, "delay");
      // Before it begins, a transfer leaves the link to others.
      if (sharesBandwidth) this.#later("piece", delayMs, () => this.#schedulePiece(0));
      else this.#schedulePiece(delayMs);
    }
  }

  /** Rejects `done`. Bytes may land until `released`. */
  abort(code: KvErrorCode, reason: string, cause?: unknown): void {
    this.#fail(this.#error(code, reason, cause));
    this.#linger();
  }

  halt(): void {
    this.#release = () => {};
    this.#end();
  }

  lostPeer(reason: string): void {
    this.#timers.piece?.cancel();
    if (!this.#fabric.reportsPeerDeath) return;
    this.#fail(this.#peerLost(reason));
    // Without the peer no byte can move, so nothing lingers.
    this.#end();
  }

  #later(what: "piece" | "linger", delayMs: number, run: () => void): void {
    this.#timers[what] = this.#fabric.clock.setTimer(run, delayMs, { ref: true });
  }

  #schedulePiece(delayMs: number): void {
    const left = this.#plan.lengthBytes - this.#landedPieces * this.#pieceBytes;
    const [here, there] = [this.from.host.name, this.to.host];
    const [source, target] = this.#request.operation === "READ" ? [there, here] : [here, there];
    const copyMs = this.#fabric.occupyLink(source, target, Math.min(this.#pieceBytes, left));
    this.#later("piece", delayMs + copyMs, () => this.#onPiece());
  }

  #onPiece(): void {
    if (this.#landedPieces >= this.#stopsBefore) {
      if (this.#rule?.fault === "fail") this.#failAndLinger(this.#injectedFault(this.#rule));
      return;
    }
    try {
      this.#copyPiece();
    } catch (error) {
      this.#failAndLinger(KvError.from(error, "KV_TRANSFER_FAILED", "bytes could not be copied"));
      return;
    }
    if (this.#landedPieces < this.#pieces) this.#schedulePiece(0);
    else {
      // `released` must resolve before `done`.
      this.#end();
      this.#landed();
    }
  }

  #copyPiece(): void {
    const peer = this.#fabric.agents.get(this.to.incarnation);
    if (peer === undefined) throw this.#peerLost("the peer is gone");
    const [source, target] =
      this.#request.operation === "READ" ? [peer, this.from] : [this.from, peer];
    this.#plan.copyNext(this.#pieceBytes, source.memories, target.memories);
    this.#landedPieces += 1;
  }

  #failAndLinger(error: KvError): void {
    this.#fail(error);
    this.#linger();
  }

  #linger(): void {
    if (this.#state !== "active") return;
    this.#state = "lingering";
    this.#later("linger", this.#fabric.latency.lingerMs, () => {
      try {
        const isCut = this.#fabric.isCut(this.from.host.name, this.to.host);
        if (this.#landedPieces < this.#pieces && !isCut) this.#copyPiece();
      } catch {
        // The peer or its memory is gone.
      }
      this.#end();
    });
  }

  #end(): void {
    if (this.#state === "released") return;
    this.#state = "released";
    this.#timers.piece?.cancel();
    this.#timers.linger?.cancel();
    this.#fabric.transfers.delete(this);
    this.#release();
  }

  #landed(): void {
    if (!this.#settles()) return;
    const { from, to } = this;
    const counters = this.#counters;
    const payload = this.#notification;
    try {
      if (payload !== undefined) this.#fabric.post({ from, to, payload });
    } catch (error) {
      counters.transfersFailed += 1;
      this.done.reject(error);
      return;
    }
    const { lengthBytes, descriptorCount, mergedCount } = this.#plan;
    counters.transfersDone += 1;
    counters.bytesTransferred += lengthBytes;
    if (payload !== undefined) counters.notificationsSent += 1;
    const transferMs = from.host.clock.now() - this.#startedMs;
    this.done.resolve({ lengthBytes, descriptorCount, mergedCount, postMs: 0, transferMs });
  }

  #fail(error: KvError): void {
    if (!this.#settles()) return;
    this.#counters.transfersFailed += 1;
    this.done.reject(error);
  }

  #settles(): boolean {
    if (this.#isSettled) return false;
    this.#isSettled = true;
    this.#timers.timeout?.cancel();
    this.#request.signal?.removeEventListener("abort", this.#onAbort);
    return true;
  }

  #error(code: KvErrorCode, reason: string, cause?: unknown): KvError {
    const { operation } = this.#request;
    const subject = `${operation} of ${this.#plan.descriptorCount} descriptors with agent ${this.to.name}`;
    return new KvError(code, `${subject} ${reason}`, { cause });
  }

  #peerLost(reason: string): KvError {
    const { name, host } = this.to;
    return new KvError(
      "KV_PEER_DISCONNECTED",
      `${this.#request.operation} of ${this.#plan.lengthBytes} bytes by agent ${this.from.name}: ${name} on ${host} cannot be reached: ${reason}`,
      { details: { peer: name, host } },
    );
  }

  #injectedFault({ code = "KV_TRANSFER_FAILED" }: FaultRule): KvError {
    return new KvError(
      code,
      `${this.#request.operation} of ${this.#plan.lengthBytes} bytes between agents ${this.from.name} and ${this.to.name} failed: an injected fault`,
    );
  }
}

function requireValidOptions({ operation, timeoutMs, notification }: TransferRequest): void {
  if (operation !== "READ" && operation !== "WRITE")
    throw invalid(`operation ${String(operation)}`);
  if (timeoutMs !== undefined && !(timeoutMs > 0 && timeoutMs < 2 ** 31))
    throw invalid(`timeoutMs ${timeoutMs}`);
  if (notification !== undefined && !(notification instanceof Uint8Array))
    throw invalid("the notification is not a Uint8Array");
}

function invalid(message: string): KvError {
  return new KvError("KV_TRANSFER_INVALID", `invalid transfer: ${message}`);
}
