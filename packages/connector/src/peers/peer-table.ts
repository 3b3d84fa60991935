import { type Clock, KvError, type Log, type Timer } from "@kv/interface";
import { createPeersBackoff } from "./peer-backoff.js";

/** Where a remote engine answers handshakes, and how it is divided into ranks. */
export interface PeerAddress {
  readonly engineId: string;
  readonly host: string;
  readonly port: number;
  readonly tpSize: number;
  readonly dcpSize: number;
  readonly ppSize: number;
  /** Which registration of its cache the caller was told of; an engine opened for an earlier one is opened anew. */
  readonly registrationGeneration?: number;
}

/**
 * The remote engines that a worker knows. Each is opened once, on first use, and shared by all requests; closed when it was not
 * used for `engineTtlMs`, when another engine answers at its address, or when it turned out to be stale, and then only after
 * the last holder let go: lists and remote agents must outlive the transfers that use them.
 */
export interface Peers<Peer> {
  /**
   * The engine, opened if need be. Errors: what `open` threw; `KV_HANDSHAKE_BACKED_OFF` while it is not tried again.
   * The caller holds it until `release`.
   */
  acquire(address: PeerAddress): Promise<PeerHold<Peer>>;
  /** The engine if it is open; counts as use. Not held: use it before the next `await`. */
  peek(engineId: string): Peer | undefined;
  /**
   * What is known of the engine is wrong (it went away, or came back as another process): the next `acquire` opens it anew, while
   * those who hold the old one end with it. `only`: unless another one has taken its place.
   */
  drop(engineId: string, reason: string, only?: Peer): void;
  outstanding(): { peers: number; opening: number; closing: number };
  /** Closes all, each when its holders have let go. Openings fail with `KV_SIDE_CHANNEL_CLOSED`. */
  close(): Promise<void>;
}

export interface PeerHold<Peer> {
  readonly peer: Peer;
  /** Safe to call twice. */
  release(): void;
}

export interface PeersOptions<Peer> {
  readonly clock: Clock;
  readonly log: Log;
  /** 0: never. vLLM 0.33: 3600 s. */
  readonly engineTtlMs: number;
  readonly backoffMinMs?: number;
  readonly backoffMaxMs?: number;
  open(address: PeerAddress): Promise<Peer>;
  close(peer: Peer): Promise<void>;
}

interface Entry<Peer> {
  readonly address: PeerAddress;
  readonly opened: Promise<Peer>;
  peer: Peer | undefined;
  holders: number;
  lastUsedMs: number;
  /** Set when the entry has left the table; it closes with its last holder. */
  dropped: boolean;
}

export function createPeers<Peer>(options: PeersOptions<Peer>): Peers<Peer> {
  const { clock, log, engineTtlMs } = options;
  const entries = new Map<string, Entry<Peer>>();
  const byHostPort = new Map<string, string>();
  const closing = new Map<Entry<Peer>, Promise<void>>();
  const backoff = createPeersBackoff({
    clock,
    ...(options.backoffMinMs === undefined ? {} : { minMs: options.backoffMinMs }),
    ...(options.backoffMaxMs === undefined ? {} : { maxMs: options.backoffMaxMs }),
  });
  const waiters = new Map<Entry<Peer>, () => void>();
  let timer: Timer | undefined;
  let closed = false;

  function start(address: PeerAddress): Entry<Peer> {
    const entry: Entry<Peer> = {
      address,
      peer: undefined,
      holders: 0,
      lastUsedMs: clock.now(),
      dropped: false,
      opened: options.open(address),
    };
    entries.set(address.engineId, entry);
    entry.opened.then(
      (peer) => {
        entry.peer = peer;
        entry.lastUsedMs = clock.now();
        backoff.succeeded(nameOf(address));
        if (entry.dropped) return finish(entry);
        replaced(address);
        arm();
      },
      (error: unknown) => {
        backoff.failed(
          nameOf(address),
          KvError.from(error, "KV_HANDSHAKE_REFUSED", `handshake with ${nameOf(address)}`),
        );
        if (entries.get(address.engineId) === entry) entries.delete(address.engineId);
        waiters.get(entry)?.();
      },
    );
    return entry;
  }

  /** Another engine answers where an old one did: the old process is gone. */
  function replaced({ engineId, host, port }: PeerAddress): void {
    const hostPort = `${host}:${port}`;
    const previous = byHostPort.get(hostPort);
    byHostPort.set(hostPort, engineId);
    if (previous !== undefined && previous !== engineId)
      drop(previous, `engine ${engineId} answers at ${hostPort}`);
  }

  function drop(engineId: string, reason: string, only?: Peer): void {
    const entry = entries.get(engineId);
    if (entry === undefined || (only !== undefined && entry.peer !== only)) return;
    entries.delete(engineId);
    const hostPort = `${entry.address.host}:${entry.address.port}`;
    if (byHostPort.get(hostPort) === engineId) byHostPort.delete(hostPort);
    entry.dropped = true;
    log.info("peer-dropped", { engineId, reason, holders: entry.holders });
    const ended = new Promise<void>((resolve) => waiters.set(entry, resolve));
    closing.set(entry, ended);
    const settle = () => {
      closing.delete(entry);
      waiters.delete(entry);
    };
    void ended.then(settle);
    finish(entry);
  }

  /** Closes a dropped entry once it is open and nobody holds it. */
  function finish(entry: Entry<Peer>): void {
    const { peer } = entry;
    const done = waiters.get(entry);
    if (!entry.dropped || entry.holders > 0 || peer === undefined || done === undefined) return;
    entry.peer = undefined;
    options.close(peer).then(done, (error: unknown) => {
      log.warn("peer-close-failed", { engineId: entry.address.engineId, error: String(error) });
      done();
    });
  }

  function arm(): void {
    timer?.cancel();
    timer = undefined;
    if (engineTtlMs <= 0 || closed) return;
    let earliestMs = Number.POSITIVE_INFINITY;
    for (const entry of entries.values()) {
      if (entry.peer !== undefined && entry.holders === 0)
        earliestMs = Math.min(earliestMs, entry.lastUsedMs);
    }
    if (earliestMs !== Number.POSITIVE_INFINITY) {
      timer = clock.setTimer(evict, Math.max(0, Math.ceil(earliestMs + engineTtlMs - clock.now())));
    }
  }

  function evict(): void {
    timer = undefined;
    for (const [engineId, entry] of [...entries]) {
      const idle = entry.peer !== undefined && entry.holders === 0;
      if (idle && clock.now() - entry.lastUsedMs >= engineTtlMs)
        drop(engineId, "not used for its time to live");
    }
    arm();
  }

  return {
    async acquire(address) {
      if (closed) throw closedError(address);
      const known = entries.get(address.engineId)?.address.registrationGeneration ?? 0;
      if (known < (address.registrationGeneration ?? 0))
        drop(address.engineId, "it registered its cache again");
      let entry = entries.get(address.engineId);
      if (entry === undefined) {
        backoff.check(nameOf(address));
        entry = start(address);
      }
      entry.holders += 1;
      let held = true;
      const release = () => {
        if (!held) return;
        held = false;
        entry.holders -= 1;
        entry.lastUsedMs = clock.now();
        if (entry.dropped) finish(entry);
        else if (timer === undefined) arm();
      };
      try {
        return { peer: await entry.opened, release };
      } catch (error) {
        release();
        throw error;
      }
    },
    peek(engineId) {
      const entry = entries.get(engineId);
      if (entry?.peer !== undefined) entry.lastUsedMs = clock.now();
      return entry?.peer;
    },
    drop,
    outstanding() {
      let opening = 0;
      for (const entry of entries.values()) if (entry.peer === undefined) opening += 1;
      return { peers: entries.size - opening, opening, closing: closing.size };
    },
    async close() {
      closed = true;
      for (const engineId of [...entries.keys()]) drop(engineId, "the worker closes");
      timer?.cancel();
      timer = undefined;
      await Promise.all(closing.values());
    },
  };
}

function nameOf({ engineId, host, port }: PeerAddress): string {
  return `engine ${engineId} at ${host}:${port}`;
}

function closedError(address: PeerAddress): KvError {
  return new KvError("KV_SIDE_CHANNEL_CLOSED", `${nameOf(address)} is not opened: the worker is closed`);
}
