import { KvError, type Timer } from "@kv/interface";
import { describeEngine, type EngineAddress, engineKey } from "./engine-address.js";
import type { Peer, PeerRef, PeerTableOptions } from "./peer.js";
import { PeerBackoff } from "./peer-backoff.js";

/** Time between two handshakes beside an open peer that changed nothing. A request that asks for one waits for so long. */
const RENEWAL_INTERVAL_MS = 1000;
/** How often one request may cause a handshake beside an open peer: the first may have begun before P registered again. */
const RENEWALS = 2;
/** Confirmed generations that an entry remembers. */
const MAX_CONFIRMED = 16;

/** A peer of `PeerTable`, from the start of its opening until it is closed. */
interface PeerEntry<P extends Peer> {
  readonly key: string;
  readonly address: EngineAddress;
  readonly opened: Promise<P>;
  peer: P | undefined;
  references: number;
  lastUsedMs: number;
  /** Set when the entry has left the table. It closes with its last reference. */
  dropped: boolean;
  /** The handshake that runs beside this entry. */
  renewal?: Promise<void> | undefined;
  /** When the next handshake beside this entry may start. */
  renewableAtMs: number;
  /** Registration generations that requests named and that a handshake has confirmed, for peers that do not send their own. */
  readonly confirmed: Set<number>;
  /** Ends the wait of `close()` for a dropped entry. */
  closed?: () => void;
}

/**
 * The remote engines that a worker knows. Each is opened once, at first use, and shared by all requests with the same address. It is closed
 * when it was unused for `engineTtlMs`, when another engine answers at its host and port, or when it was dropped as stale; always after
 * its last reference, because prepared lists and remote agents must outlive the transfers that use them. What a request says about a peer
 * never drops it: at most it causes another handshake at the same address, beside the open peer, and only what answers there replaces it.
 */
export class PeerTable<P extends Peer> {
  readonly #options: PeerTableOptions<P>;
  readonly #entries = new Map<string, PeerEntry<P>>();
  /** Open entries by host and port, to find those that another engine replaces. */
  readonly #byHostPort = new Map<string, Set<PeerEntry<P>>>();
  readonly #closing = new Map<PeerEntry<P>, Promise<void>>();
  readonly #backoff: PeerBackoff;
  readonly #renewals = new Set<Promise<void>>();
  #timer: Timer | undefined;
  #closed = false;

  constructor(options: PeerTableOptions<P>) {
    this.#options = options;
    this.#backoff = new PeerBackoff({ clock: options.clock });
  }

  /**
   * Returns a reference to the peer. Opens the peer first if it is not open. When `signal` aborts, the call rejects with its reason, and a reference that
   * arrives later is released. Errors: those of `open`; `KV_HANDSHAKE_BACKED_OFF` during the back-off after a failure;
   * `KV_GENERATION_STALE` for a `registrationGeneration` that the peer does not have; `KV_SIDE_CHANNEL_CLOSED` after `close`; the signal's
   * reason.
   */
  acquire(address: EngineAddress, signal?: AbortSignal): Promise<PeerRef<P>> {
    const acquired = this.#acquire(address);
    return signal === undefined
      ? acquired
      : whileNotAborted(acquired, signal, (reference) => reference.release());
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

  /**
   * Shakes hands again at the peer's address, beside the peer. The new peer replaces it if it differs. Resolves when the table has the current
   * one. Concurrent calls share a handshake, and one that changes nothing is not repeated for a second. A failure leaves the peer as it is.
   * Errors: those of `open`; the signal's reason.
   */
  renew(peer: P, signal?: AbortSignal): Promise<void> {
    const entry = this.#entries.get(engineKey(peer.address));
    if (entry?.peer !== peer) return Promise.resolve();
    const renewed = this.#renew(entry, entry.address);
    return signal === undefined ? renewed : whileNotAborted(renewed, signal, () => {});
  }

  /** Numbers of peers that are open, being opened, and dropped but still referenced. */
  outstanding(): { readonly peers: number; readonly opening: number; readonly closing: number } {
    let opening = 0;
    let renewing = 0;
    for (const { peer, renewal } of this.#entries.values()) {
      if (peer === undefined) opening += 1;
      if (renewal !== undefined) renewing += 1;
    }
    return {
      peers: this.#entries.size - opening,
      opening: opening + renewing,
      closing: this.#closing.size,
    };
  }

  /** Closes every peer after its last reference. `acquire` rejects from now on with `KV_SIDE_CHANNEL_CLOSED`. */
  async close(): Promise<void> {
    this.#closed = true;
    for (const entry of [...this.#entries.values()]) this.#drop(entry, "the worker closes");
    this.#timer?.cancel();
    this.#timer = undefined;
    await Promise.allSettled(this.#renewals);
    await Promise.all(this.#closing.values());
  }

  /** As `close`. */
  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  async #acquire(address: EngineAddress): Promise<PeerRef<P>> {
    const key = engineKey(address);
    for (let attempt = 0; ; attempt += 1) {
      if (this.#closed) {
        throw new KvError(
          "KV_SIDE_CHANNEL_CLOSED",
          `${describeEngine(address)} is not opened: the worker is closed`,
        );
      }
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
        const peer = await held.opened;
        const asked = attempt >= RENEWALS;
        if (hasRegistration(held, peer, address, asked)) {
          if (held.confirmed.size === 0) confirm(held, address.registrationGeneration);
          return { peer, release, [Symbol.dispose]: release };
        }
        if (asked) throw unknownRegistration(address, peer);
      } catch (error) {
        release();
        throw error;
      }
      release();
      await this.#renew(held, address);
    }
  }

  /** Shares one handshake beside an entry among all that ask for it. */
  #renew(entry: PeerEntry<P>, claimed: EngineAddress): Promise<void> {
    if (entry.renewal === undefined) {
      const renewal = this.#openBeside(entry, claimed).finally(() => {
        entry.renewal = undefined;
        this.#renewals.delete(renewal);
      });
      entry.renewal = renewal;
      this.#renewals.add(renewal);
    }
    return entry.renewal;
  }

  async #openBeside(entry: PeerEntry<P>, { registrationGeneration }: EngineAddress): Promise<void> {
    const { clock, close, log, metrics, failureType, open } = this.#options;
    const waitMs = Math.ceil(entry.renewableAtMs - clock.now());
    if (waitMs > 0) await new Promise<void>((resolve) => void clock.setTimer(resolve, waitMs, { ref: true }));
    const before = entry.peer;
    if (before === undefined || this.#closed || this.#entries.get(entry.key) !== entry) return;
    const { engineId, host, port } = entry.address;
    try {
      const peer = await open({ ...entry.address, registrationGeneration });
      const isSame = peer.fingerprint !== undefined && peer.fingerprint === before.fingerprint;
      if (isSame || this.#closed || this.#entries.get(entry.key) !== entry) {
        if (isSame) confirm(entry, registrationGeneration);
        await close(peer);
      } else {
        this.#drop(entry, "another handshake at its address gave other metadata");
        this.#keep(this.#entryOf(entry.key, peer.address, Promise.resolve(peer)), peer);
      }
    } catch (error) {
      metrics.handshakeFailed();
      log.warn(failureType, { engineId, host, port, error: String(error) });
      throw error;
    } finally {
      entry.renewableAtMs = clock.now() + RENEWAL_INTERVAL_MS;
    }
  }

  #open(key: string, address: EngineAddress): PeerEntry<P> {
    const { log, metrics, failureType, open } = this.#options;
    const { engineId, host, port } = address;
    const entry = this.#entryOf(key, address, open(address));
    this.#entries.set(key, entry);
    entry.opened.then(
      (peer) => {
        this.#backoff.succeeded(address);
        this.#keep(entry, peer);
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

  #entryOf(key: string, address: EngineAddress, opened: Promise<P>): PeerEntry<P> {
    const nowMs = this.#options.clock.now();
    return {
      key,
      address,
      opened,
      peer: undefined,
      references: 0,
      lastUsedMs: nowMs,
      dropped: false,
      renewableAtMs: nowMs,
      confirmed: new Set(),
    };
  }

  /** Records that an entry's peer is open. */
  #keep(entry: PeerEntry<P>, peer: P): void {
    entry.peer = peer;
    entry.lastUsedMs = this.#options.clock.now();
    confirm(entry, entry.address.registrationGeneration);
    if (entry.dropped) this.#closeUnreferenced(entry);
    else {
      this.#entries.set(entry.key, entry);
      this.#replaceOthersAt(entry);
    }
    this.#armTimer();
  }

  /** Drops the engines with another id at the same host and port: their process is gone. */
  #replaceOthersAt(entry: PeerEntry<P>): void {
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

  #drop(entry: PeerEntry<P>, reason: string): void {
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

  #release(entry: PeerEntry<P>): void {
    entry.references -= 1;
    entry.lastUsedMs = this.#options.clock.now();
    if (entry.dropped) this.#closeUnreferenced(entry);
    else if (this.#timer === undefined) this.#armTimer();
  }

  /** Closes a dropped entry when it is open and has no references. */
  #closeUnreferenced(entry: PeerEntry<P>): void {
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

/** Whether the open peer has the registration that the parameters of a request name. `asked`: further handshakes would not help. */
function hasRegistration<P extends Peer>(
  { confirmed }: PeerEntry<P>,
  peer: P,
  { registrationGeneration: named }: EngineAddress,
  asked: boolean,
): boolean {
  if (named === undefined) return true;
  if (peer.registrationGeneration !== undefined) return named <= peer.registrationGeneration;
  // vLLM's handshake does not say it. Once another handshake has given the same metadata, the open peer is current, whatever was named.
  return asked || confirmed.size === 0 || confirmed.has(named);
}

/** Records a generation that a handshake has confirmed. */
function confirm<P extends Peer>({ confirmed }: PeerEntry<P>, generation: number | undefined): void {
  if (generation === undefined) return;
  confirmed.add(generation);
  const [oldest] = confirmed;
  if (confirmed.size > MAX_CONFIRMED && oldest !== undefined) confirmed.delete(oldest);
}

/** The error for parameters whose registration the peer does not have. */
function unknownRegistration(address: EngineAddress, peer: Peer): KvError {
  const [named, found] = [address.registrationGeneration, peer.registrationGeneration];
  return new KvError(
    "KV_GENERATION_STALE",
    `kv_transfer_params name registration ${named} of the KV cache of ${describeEngine(address)}, which has registered it ${found} times`,
    {
      hint: "pass the kv_transfer_params of the prefill answer on unchanged",
      details: { named, found },
    },
  );
}

/**
 * Rejects with the signal's reason as soon as it aborts. A result that arrives after that is given to `unwanted`. Errors: those of `work`; the
 * signal's reason.
 */
function whileNotAborted<T>(
  work: Promise<T>,
  signal: AbortSignal,
  unwanted: (result: T) => void,
): Promise<T> {
  return new Promise((resolve, reject) => {
    const onAbort = () => reject(signal.reason as Error);
    if (signal.aborted) onAbort();
    else signal.addEventListener("abort", onAbort);
    work.then(
      (result) => {
        signal.removeEventListener("abort", onAbort);
        if (signal.aborted) unwanted(result);
        else resolve(result);
      },
      (error: unknown) => {
        signal.removeEventListener("abort", onAbort);
        reject(error as Error);
      },
    );
  });
}
