import type { Clock, Log } from "@kv/interface";
import type { TransferMetrics } from "../metrics/transfer-metrics.js";
import type { EngineAddress } from "./engine-address.js";

/** Anything opened at an engine's address. */
export interface Peer {
  /** The address that the peer was opened for. */
  readonly address: EngineAddress;
  /** How often the peer has registered its KV cache, by its own handshake; undefined for vLLM, which says so only in `kv_transfer_params`. */
  readonly registrationGeneration?: number | undefined;
  /** Differs when another handshake would lead to other memory or to another process. Undefined: every handshake differs. */
  readonly fingerprint?: string | undefined;
}

/** A counted reference to an open peer. The peer stays open until every reference was released. */
export interface PeerRef<P extends Peer> extends Disposable {
  /** The open peer. */
  readonly peer: P;
  /** Ends the reference. Safe to call twice. */
  release(): void;
}

/** Options of `PeerTable`. */
export interface PeerTableOptions<P extends Peer> {
  /** Clock for the back-off and the time to live. */
  readonly clock: Clock;
  /** Gets an entry for each failed opening and each dropped peer. */
  readonly log: Log;
  /** Counts failed openings. */
  readonly metrics: Pick<TransferMetrics, "handshakeFailed">;
  /** An unused peer is closed after this long; 0 means never. vLLM 0.33: 3,600,000 (`engine_ttl`). */
  readonly engineTtlMs: number;
  /** vLLM's name of a failed opening, for the log. */
  readonly failureType: string;
  /** Opens the peer at an address: the handshake and all that follows from it. */
  open(address: EngineAddress): Promise<P>;
  /** Closes a peer that no reference holds. */
  close(peer: P): Promise<void>;
}
