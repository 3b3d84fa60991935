import { type Clock, KvError, type Log, type Timer } from "@kv/interface";
import type { TransferMetrics } from "../metrics/transfer-metrics.js";
import { describeEngine, type EngineAddress, engineKey } from "./engine-address.js";
import { PeerBackoff } from "./peer-backoff.js";

/** Anything opened at an engine's address. */
export interface Peer {
  /** The address that the peer was opened for. */
  readonly address: EngineAddress;
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

interface Entry<P extends Peer> {
  readonly key: string;
  readonly address: EngineAddress;
  readonly opened: Promise<P>;
  peer: P | undefined;
  references: number;
  lastUsedMs: number;
  /** Set when the entry has left the table. It closes with its last reference. */
  dropped: boolean;
  /** Ends the wait of `close()` for a dropped entry. */
  closed?: () => void;
}

/**
 * The remote engines that a worker knows. Each is opened once, at first use, and shared by all requests with the same address. It is closed
 * when it was unused for `engineTtlMs`, when another engine answers at its host and port, or when it was dropped as stale; always after
 * its last reference, because prepared lists and remote agents must outlive the transfers that use them.
 */
export class PeerTable<P extends Peer> {
  readonly #options: PeerTableOptions<P>;
  readonly #entries = new Map<string, Entry<P>>();
  /** Open entries by host and port, to find those that another engine replaces. */
  readonly #byHostPort = new Map<string, Set<Entry<P>>>();
  readonly #closing = new Map<Entry<P>, Promise<void>>();
  readonly #backoff: PeerBackoff;
  #timer: Timer | undefined;
  #closed = false;

  constructor(options: PeerTableOptions<P>) {
    this.#options = options;
    this.#backoff = new PeerBackoff({ clock: options.clock });
  }

  /**
   * Returns a reference to the peer. Opens the peer first if it is not open. When `signal` aborts, the call rejects with its reason, and a reference that
   * arrives later is released. Errors: those of `open`; `KV_HANDSHAKE_BACKED_OFF` during the back-off after a failure;
   * `KV_SIDE_CHANNEL_CLOSED` after `close`; the signal's reason.
   */
  acquire(address: EngineAddress, signal?: AbortSignal): Promise<PeerRef<P>> {
    const acquired = this.#acquire(address);
    return signal === undefined ? acquired : whileNotAborted(acquired, signal);
  }

  /** The peer if it is open; counts as a use. Without a reference it may be closed at the next `await`. */
  peek(address: EngineAddress): P | undefined {
    const entry = this.#entries.get(engineKey(address));
    if (entry?.peer !== undefined) entry.lastUsedMs = this.#options.clock.now();
    return entry?.peer;
  }

  /**
   * Removes a peer that is known to be stale (it is gone, or another process has its address). The next `acquire` opens it again; existing
   * references stay valid. Without effect when the peer was removed before.
   */
  drop(peer: P, reason: string): void {
    const entry = this.#entries.get(engineKey(peer.address));
    if (entry?.peer === peer) this.#drop(entry, reason);
  }

  /** Numbers of peers that are open, being opened, and dropped but still referenced. */
  outstanding(): { readonly peers: number; readonly opening: number; readonly closing: number } {
    let opening = 0;
    for (const { peer } of this.#entries.values()) if (peer === undefined) opening += 1;
    return { peers: this.#entries.size - opening, opening, closing: this.#closing.size };
  }

  /** Closes every peer after its last reference. `acquire` rejects from now on with `KV_SIDE_CHANNEL_CLOSED`. */
  async close(): Promise<void> {
    this.#closed = true;
    for (const entry of [...this.#entries.values()]) this.#drop(entry, "the worker closes");
    this.#timer?.cancel();
    this.#timer = undefined;
    await Promise.all(this.#closing.values());
  }

  /** As `close`. */
  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  async #acquire(address: EngineAddress): Promise<PeerRef<P>> {
    if (this.#closed) {
      throw new KvError(
        "KV_SIDE_CHANNEL_CLOSED",
        `${describeEngine(address)} is not opened: the worker is closed`,
      );
    }
    const key = engineKey(address);
    const known = this.#entries.get(key);
    if (
      known !== undefined &&
      (known.address.registrationGeneration ?? 0) < (address.registrationGeneration ?? 0)
    )
      this.#drop(known, "it registered its cache again");
    let entry = this.#entries.get(key);
    if (entry === undefined) {
      this.#backoff.check(address);
      entry = this.#open(key, address);
    }
    const held = entry;
    held.references += 1;
    let released = false;
    const release = () => {
      if (released) return;
      released = true;
      this.#release(held);
    };
    try {
      return { peer: await held.opened, release, [Symbol.dispose]: release };
    } catch (error) {
      release();
      throw error;
    }
  }

  #open(key: string, address: EngineAddress): Entry<P> {
    const { clock, log, metrics, failureType, open } = this.#options;
    const { engineId, host, port } = address;
    const entry: Entry<P> = {
      key,
      address,
      peer: undefined,
      references: 0,
      lastUsedMs: clock.now(),
      dropped: false,
      opened: open(address),
    };
    this.#entries.set(key, entry);
    entry.opened.then(
      (peer) => {
        entry.peer = peer;
        entry.lastUsedMs = clock.now();
        this.#backoff.succeeded(address);
        if (entry.dropped) this.#closeUnreferenced(entry);
        else this.#replaceOthersAt(entry);
        this.#armTimer();
      },
      (error: unknown) => {
        metrics.handshakeFailed();
        log.warn(failureType, { engineId, host, port, error: String(error) });
        const cause = KvError.from(
          error,
          "KV_HANDSHAKE_REFUSED",
          `handshake with ${describeEngine(address)}`,
        );
        this.#backoff.failed(address, cause);
        if (this.#entries.get(key) === entry) this.#entries.delete(key);
        entry.closed?.();
      },
    );
    return entry;
  }

  /** Drops the engines with another id at the same host and port: their process is gone. */
  #replaceOthersAt(entry: Entry<P>): void {
    const hostPort = `${entry.address.host}:${entry.address.port}`;
    const others = this.#byHostPort.get(hostPort) ?? new Set();
    this.#byHostPort.set(hostPort, others);
    const { engineId } = entry.address;
    for (const other of [...others]) {
      if (other.address.engineId !== engineId) this.#drop(other, `engine ${engineId} answers at ${hostPort}`);
    }
    others.add(entry);
    this.#byHostPort.set(hostPort, others);
  }

  #drop(entry: Entry<P>, reason: string): void {
    const { log } = this.#options;
    const { engineId, host, port } = entry.address;
    this.#entries.delete(entry.key);
    const atHostPort = this.#byHostPort.get(`${host}:${port}`);
    atHostPort?.delete(entry);
    if (atHostPort?.size === 0) this.#byHostPort.delete(`${host}:${port}`);
    entry.dropped = true;
    log.info("peer-dropped", { engineId, reason, references: entry.references });
    const closed = new Promise<void>((resolve) => {
      entry.closed = resolve;
    });
    this.#closing.set(entry, closed);
    void closed.then(() => this.#closing.delete(entry));
    this.#closeUnreferenced(entry);
  }

  #release(entry: Entry<P>): void {
    entry.references -= 1;
    entry.lastUsedMs = this.#options.clock.now();
    if (entry.dropped) this.#closeUnreferenced(entry);
    else if (this.#timer === undefined) this.#armTimer();
  }

  /** Closes a dropped entry when it is open and has no references. */
  #closeUnreferenced(entry: Entry<P>): void {
    const { peer, closed, dropped, references } = entry;
    if (!dropped || references > 0 || peer === undefined || closed === undefined) return;
    entry.peer = undefined;
    this.#options.close(peer).then(closed, (error: unknown) => {
      this.#options.log.warn("peer-close-failed", {
        engineId: entry.address.engineId,
        error: String(error),
      });
      closed();
    });
  }

  #armTimer(): void {
    const { clock, engineTtlMs } = this.#options;
    this.#timer?.cancel();
    this.#timer = undefined;
    if (engineTtlMs <= 0 || this.#closed) return;
    let earliestMs = Number.POSITIVE_INFINITY;
    for (const { peer, references, lastUsedMs } of this.#entries.values()) {
      if (peer !== undefined && references === 0) earliestMs = Math.min(earliestMs, lastUsedMs);
    }
    if (earliestMs !== Number.POSITIVE_INFINITY) {
      const delayMs = Math.max(0, Math.ceil(earliestMs + engineTtlMs - clock.now()));
      this.#timer = clock.setTimer(() => this.#dropUnused(), delayMs);
    }
  }

  #dropUnused(): void {
    const { clock, engineTtlMs } = this.#options;
    this.#timer = undefined;
    for (const entry of [...this.#entries.values()]) {
      const isUnused = entry.peer !== undefined && entry.references === 0;
      if (isUnused && clock.now() - entry.lastUsedMs >= engineTtlMs)
        this.#drop(entry, "it was not used for engine_ttl");
    }
    this.#armTimer();
  }
}

/** Codes of transfer errors that mean that the peer is gone or its metadata is stale. The peer must then be dropped. */
const PEER_LOST: readonly string[] = [
  "KV_PEER_DISCONNECTED",
  "KV_AGENT_UNKNOWN_REMOTE",
  "KV_TRANSFER_FAILED",
  "KV_TRANSFER_TIMEOUT",
  "KV_NOTIFICATION_FAILED",
];

/** Whether a failed transfer means that the peer must be dropped and opened again. */
export function isPeerLost(error: KvError): boolean {
  return PEER_LOST.includes(error.code);
}

/** Rejects with the signal's reason as soon as it aborts, and releases a reference that arrives after that. */
function whileNotAborted<P extends Peer>(
  acquired: Promise<PeerRef<P>>,
  signal: AbortSignal,
): Promise<PeerRef<P>> {
  return new Promise((resolve, reject) => {
    const onAbort = () => reject(signal.reason as Error);
    if (signal.aborted) onAbort();
    else signal.addEventListener("abort", onAbort);
    acquired.then(
      (reference) => {
        signal.removeEventListener("abort", onAbort);
        if (signal.aborted) reference.release();
        else resolve(reference);
      },
      (error: unknown) => {
        signal.removeEventListener("abort", onAbort);
        reject(error as Error);
      },
    );
  });
}
