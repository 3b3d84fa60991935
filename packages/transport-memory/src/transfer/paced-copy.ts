import { KvError, type Timer, type TransferRequest } from "@kv/interface";
import type { AgentEndpoint, InFlightTransfer, PeerAddress } from "../network/endpoints.js";
import type { Fabric } from "../network/fabric.js";
import { DEFAULT_FAULT_DELAY_MS, type FaultRule } from "../network/fault-plan.js";
import { pieceLength } from "../network/latency.js";
import type { CopyPlan } from "./copy-plan.js";

export interface PacedCopyOptions {
  readonly fabric: Fabric;
  readonly from: AgentEndpoint;
  readonly to: PeerAddress;
  readonly operation: TransferRequest["operation"];
  readonly plan: CopyPlan;
  /** Called at most once, when every byte has landed. Never called after `failed`. */
  landed(): void;
  /** Called at most once, when the copy fails. */
  failed(error: KvError): void;
  /** Called once when no further byte will be written, before `landed` and after `failed`. */
  released(): void;
}

/**
 * Copies the bytes of one transfer in pieces over time. A transfer that failed or was aborted keeps
 * writing for `lingerMs` and writes once more just before its release, as a network adapter that
 * cannot be stopped: a test then sees when its memory was reused too early.
 */
export class PacedCopy implements InFlightTransfer {
  readonly from: AgentEndpoint;
  readonly to: PeerAddress;
  readonly #options: PacedCopyOptions;
  readonly #fabric: Fabric;
  readonly #rule: FaultRule | undefined;
  readonly #pieceBytes: number;
  readonly #pieces: number;
  /**
   * Index of the piece before which a fault stops the copy; the count of pieces where none does.
   */
  readonly #stopsBefore: number;
  #landedPieces = 0;
  #state: "active" | "lingering" | "released" = "active";
  #pieceTimer: Timer | undefined;
  #lingerTimer: Timer | undefined;

  constructor(options: PacedCopyOptions) {
    const { fabric, from, to, plan, operation } = options;
    this.from = from;
    this.to = to;
    this.#options = options;
    this.#fabric = fabric;
    this.#pieceBytes = pieceLength(plan.lengthBytes, fabric.latency);
    this.#pieces = Math.ceil(plan.lengthBytes / this.#pieceBytes);
    const rule = fabric.faults.decide({
      operation,
      from: from.host.name,
      fromAgent: from.name,
      to: to.host,
      toAgent: to.name,
      lengthBytes: plan.lengthBytes,
    });
    this.#rule = rule;
    const stops = rule?.fault === "drop" || rule?.fault === "fail";
    this.#stopsBefore = stops ? fabric.random.integer(this.#pieces) : this.#pieces;
  }

  /** Starts the copy. Fails at once when the peer cannot be reached. */
  start(): void {
    const { from, to } = this;
    const fabric = this.#fabric;
    const rule = this.#rule;
    fabric.transfers.add(this);
    if (rule?.fault === "disconnect") fabric.cut(from.host.name, to.host, rule.forMs);
    if (this.#state !== "active") return;
    if (fabric.isCut(from.host.name, to.host)) this.lostPeer("the hosts are disconnected");
    else if (!fabric.agents.has(to.incarnation)) this.lostPeer("the peer is gone");
    else {
      const extraMs = rule?.fault === "delay" ? (rule.delayMs ?? DEFAULT_FAULT_DELAY_MS) : 0;
      const { rangeMs, sharesBandwidth } = fabric.latency;
      const delayMs = fabric.drawLatencyMs() + rangeMs * this.#options.plan.mergedCount + extraMs;
      // A transfer that has not begun leaves the link to the others.
      if (sharesBandwidth)
        this.#pieceTimer = fabric.clock.setTimer(() => this.#schedulePiece(0), delayMs, {
          ref: true,
        });
      else this.#schedulePiece(delayMs);
    }
  }

  /** Called when the caller aborts the transfer. Bytes may land until `released`. */
  abort(): void {
    this.#linger();
  }

  /** Stops at once and calls nothing, because the process that started the transfer is gone. */
  halt(): void {
    if (this.#state === "released") return;
    this.#state = "released";
    this.#stopTimers();
    this.#fabric.transfers.delete(this);
  }

  lostPeer(reason: string): void {
    this.#pieceTimer?.cancel();
    if (!this.#fabric.reportsPeerDeath) return;
    if (this.#state === "active") this.#options.failed(this.#peerLost(reason));
    // Without the peer no byte can move, so nothing lingers.
    this.#release();
  }

  #schedulePiece(delayMs: number): void {
    const { plan, operation } = this.#options;
    const bytes = Math.min(
      this.#pieceBytes,
      plan.lengthBytes - this.#landedPieces * this.#pieceBytes,
    );
    const [here, there] = [this.from.host.name, this.to.host];
    const [source, target] = operation === "READ" ? [there, here] : [here, there];
    const durationMs = delayMs + this.#fabric.occupyLink(source, target, bytes);
    this.#pieceTimer = this.#fabric.clock.setTimer(() => this.#onPiece(), durationMs, {
      ref: true,
    });
  }

  #onPiece(): void {
    this.#pieceTimer = undefined;
    if (this.#landedPieces >= this.#stopsBefore) {
      if (this.#rule?.fault === "fail") this.#fail(injectedFault(this.#rule, this.#options));
      return;
    }
    try {
      this.#copyPiece();
    } catch (error) {
      this.#fail(KvError.from(error, "KV_TRANSFER_FAILED", "bytes could not be copied"));
      return;
    }
    if (this.#landedPieces < this.#pieces) this.#schedulePiece(0);
    else if (this.#state === "active") {
      // Release first: `released` has resolved by the time `done` resolves.
      this.#release();
      this.#options.landed();
    } else this.#release();
  }

  #copyPiece(): void {
    const { plan, operation } = this.#options;
    const peer = this.#fabric.agents.get(this.to.incarnation);
    if (peer === undefined) throw this.#peerLost("the peer is gone");
    const [source, target] = operation === "READ" ? [peer, this.from] : [this.from, peer];
    plan.copyNext(this.#pieceBytes, source.memories, target.memories);
    this.#landedPieces += 1;
  }

  #fail(error: KvError): void {
    if (this.#state === "active") this.#options.failed(error);
    this.#linger();
  }

  #linger(): void {
    if (this.#state !== "active") return;
    this.#state = "lingering";
    const { clock, latency } = this.#fabric;
    this.#lingerTimer = clock.setTimer(() => this.#lastWrite(), latency.lingerMs, { ref: true });
  }

  #lastWrite(): void {
    try {
      const isCut = this.#fabric.isCut(this.from.host.name, this.to.host);
      if (this.#landedPieces < this.#pieces && !isCut) this.#copyPiece();
    } catch {
      // The peer or its memory is gone: nothing is left to write to.
    }
    this.#release();
  }

  #release(): void {
    if (this.#state === "released") return;
    this.#state = "released";
    this.#stopTimers();
    this.#fabric.transfers.delete(this);
    this.#options.released();
  }

  #stopTimers(): void {
    this.#pieceTimer?.cancel();
    this.#lingerTimer?.cancel();
  }

  #peerLost(reason: string): KvError {
    const { operation, plan } = this.#options;
    const { name, host } = this.to;
    return new KvError(
      "KV_PEER_DISCONNECTED",
      `${operation} of ${plan.lengthBytes} bytes by agent ${this.from.name}: ${name} on ${host} cannot be reached: ${reason}`,
      { details: { peer: name, host } },
    );
  }
}

function injectedFault(rule: FaultRule, { operation, from, to, plan }: PacedCopyOptions): KvError {
  return new KvError(
    rule.code ?? "KV_TRANSFER_FAILED",
    `${operation} of ${plan.lengthBytes} bytes between agents ${from.name} and ${to.name} failed: an injected fault`,
  );
}
