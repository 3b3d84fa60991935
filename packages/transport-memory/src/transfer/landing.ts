import { KvError, type Timer, type TransferRequest } from "@kv/interface";
import type { AgentEndpoint, Fabric, FlyingTransfer, PeerAddress } from "../network/fabric.js";
import { DEFAULT_FAULT_DELAY_MS, type FaultRule } from "../network/fault-plan.js";
import { pieceLength } from "../network/latency.js";
import type { CopyPlan } from "./copy-plan.js";

export interface LandingOptions {
  readonly fabric: Fabric;
  readonly from: AgentEndpoint;
  readonly to: PeerAddress;
  readonly operation: TransferRequest["operation"];
  readonly plan: CopyPlan;
  /** Every byte has landed; called at most once, and never after `failed`. */
  landed(): void;
  failed(error: KvError): void;
  /** No byte lands any more; called once, after the other two. */
  released(): void;
}

export interface Landing {
  /** The caller wants it no more. Bytes may go on landing until `released`. */
  giveUp(): void;
  /** The process that began it is gone: not one byte more, and nobody is told. */
  halt(): void;
}

/**
 * Bytes of one transfer on their way, in pieces over time. A transfer that failed or was given up goes on writing for
 * `lingerMs`, up to the instant before its release, as an adapter does that nobody can stop: memory that was given to
 * another meanwhile is seen to be overwritten.
 */
export function startLanding(options: LandingOptions): Landing {
  const { fabric, from, to, plan } = options;
  const { clock, latency } = fabric;
  const piece = pieceLength(plan.lengthBytes, latency);
  const pieces = Math.ceil(plan.lengthBytes / piece);
  let landedPieces = 0;
  let over: "no" | "given-up" | "released" = "no";
  let pieceTimer: Timer | undefined;
  let lingerTimer: Timer | undefined;

  const rule = fabric.faults.decide({
    operation: options.operation,
    from: from.host.name,
    fromAgent: from.name,
    to: to.host,
    toAgent: to.name,
    lengthBytes: plan.lengthBytes,
  });
  const extraMs = rule?.fault === "delay" ? (rule.delayMs ?? DEFAULT_FAULT_DELAY_MS) : 0;
  /** The piece before which a fault stops it. */
  const stopsBefore =
    rule?.fault === "drop" || rule?.fault === "fail" ? fabric.random.integer(pieces) : pieces;

  function landPiece(): void {
    const peer = fabric.agents.get(to.incarnation);
    if (peer === undefined) throw lost("the peer is gone");
    const [source, target] = options.operation === "READ" ? [peer, from] : [from, peer];
    plan.land(piece, source.memories, target.memories);
    landedPieces += 1;
  }

  function next(delayMs: number): void {
    const bytes = Math.min(piece, plan.lengthBytes - landedPieces * piece);
    pieceTimer = clock.setTimer(onPiece, delayMs + bytes / latency.bytesPerMs, { ref: true });
  }

  function onPiece(): void {
    pieceTimer = undefined;
    if (landedPieces >= stopsBefore) {
      if (rule?.fault === "fail") fail(injected(rule, options));
      return;
    }
    try {
      landPiece();
    } catch (error) {
      fail(KvError.from(error, "KV_TRANSFER_FAILED", "bytes could not land"));
      return;
    }
    if (landedPieces < pieces) next(0);
    else if (over === "no") {
      // Released first: by the time `done` has resolved, `released` has.
      release();
      options.landed();
    } else release();
  }

  function fail(error: KvError): void {
    if (over === "no") options.failed(error);
    linger();
  }

  function linger(): void {
    if (over !== "no") return;
    over = "given-up";
    lingerTimer = clock.setTimer(
      () => {
        try {
          if (landedPieces < pieces && !fabric.isCut(from.host.name, to.host)) landPiece();
        } catch {
          // The peer or its memory is gone: there is nothing left to write to.
        }
        release();
      },
      latency.lingerMs,
      { ref: true },
    );
  }

  function release(): void {
    if (over === "released") return;
    over = "released";
    stop();
    fabric.transfers.delete(flying);
    options.released();
  }

  function stop(): void {
    pieceTimer?.cancel();
    lingerTimer?.cancel();
  }

  function lost(reason: string): KvError {
    return new KvError(
      "KV_PEER_DISCONNECTED",
      `${options.operation} of ${plan.lengthBytes} bytes by agent ${from.name}: ${to.name} on ${to.host} cannot be reached: ${reason}`,
      { details: { peer: to.name, host: to.host } },
    );
  }

  const flying: FlyingTransfer = {
    from,
    to,
    lostPeer(reason) {
      pieceTimer?.cancel();
      if (!fabric.reportsPeerDeath) return;
      if (over === "no") options.failed(lost(reason));
      // Without the peer no byte can move: nothing lingers.
      release();
    },
  };
  fabric.transfers.add(flying);
  if (rule?.fault === "disconnect") fabric.cut(from.host.name, to.host, rule.forMs);
  if (over === "no") {
    if (fabric.isCut(from.host.name, to.host)) flying.lostPeer("the hosts are disconnected");
    else if (!fabric.agents.has(to.incarnation)) flying.lostPeer("the peer is gone");
    else next(fabric.drawLatencyMs() + extraMs);
  }

  return {
    giveUp: linger,
    halt() {
      if (over === "released") return;
      over = "released";
      stop();
      fabric.transfers.delete(flying);
    },
  };
}

function injected(rule: FaultRule, { operation, from, to, plan }: LandingOptions): KvError {
  return new KvError(
    rule.code ?? "KV_TRANSFER_FAILED",
    `${operation} of ${plan.lengthBytes} bytes between agents ${from.name} and ${to.name} failed: an injected fault`,
  );
}
