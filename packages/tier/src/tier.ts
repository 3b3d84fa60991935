import {
  type AmbientOptions,
  ambient,
  type BackendSpec,
  type Clock,
  KvError,
  type Log,
  type Memory,
  type Transport,
} from "@kv/interface";
import { type HandshakeKeys, type ZmqSideChannel, zmqSideChannel } from "@kv/side-channel";
import { TierBlocks } from "./blocks.js";
import { PeerLinks } from "./links.js";
import { MESSAGE_LIMITS } from "./messages.js";
import type { BlockStore } from "./server-role.js";
import { disconnected, type Namespace, TierSession } from "./session.js";

/** Options of `openTier`. */
export interface TierOptions extends AmbientOptions, Namespace {
  /** Moves the blocks. The caller closes it. */
  readonly transport: Transport;
  /** @default the transport's own choice */
  readonly backends?: readonly BackendSpec[] | undefined;
  /** This host's address to bind; with the port, this side's name. */
  readonly host: string;
  /** 0 takes a free port. */
  readonly port: number;
  /** The served blocks, one after another. The caller closes it. */
  readonly memory: Memory;
  readonly store: BlockStore;
  /** Blocks that peers can write at a time. @default 256 */
  readonly landingBlocks?: number | undefined;
  /** vLLM: `VLLM_P2P_MAX_PEERS`. @default 128 */
  readonly maxPeers?: number | undefined;
  /**
   * Whether a peer that calls itself `host:port`, which this side dials, may come from this
   * address. @default all
   */
  readonly admits?: ((peerId: string, address: string) => boolean) | undefined;
  /** Encrypts the side channel, and so refuses plain vLLM. */
  readonly handshakeKeys?: HandshakeKeys | undefined;
}

/** Options of `Tier.read`. */
export interface ReadOptions {
  /** Ends the read and tells the peer. */
  readonly signal?: AbortSignal | undefined;
}

/** A member of vLLM's P2P tier. */
export interface Tier extends AsyncDisposable {
  /** The `host:port` that a request's `remote_kv_source` names. */
  readonly localId: string;
  /** Peers with a session. */
  readonly peers: readonly string[];
  /**
   * Reads a prefix's blocks up to the first that the peer lacks. `take` must copy each before it
   * returns. Resolves with their number.
   * @throws `KV_PEER_DISCONNECTED`, `KV_TRANSFER_FAILED`, `KV_TRANSFER_TIMEOUT`,
   * `KV_TRANSFER_ABORTED`, `KV_HANDSHAKE_INCOMPATIBLE`, `KV_HANDSHAKE_BACKED_OFF`.
   */
  read(
    peerId: string,
    keys: readonly Uint8Array[],
    take: (key: Uint8Array, bytes: Uint8Array) => void,
    options?: ReadOptions,
  ): Promise<number>;
  /** Ends all sessions, and waits until nothing reads `memory`. */
  close(): Promise<void>;
}

/** vLLM's `_RECONNECT_MIN_BACKOFF_S` and `_RECONNECT_MAX_BACKOFF_S`. */
const MIN_BACK_OFF_MS = 1_000;
const MAX_BACK_OFF_MS = 60_000;
/** vLLM's `VLLM_P2P_IDLE_TIMEOUT_S`: a peer idle this long may make room. */
const IDLE_MS = 300_000;

/**
 * Joins vLLM 0.33's P2P tier: serves `memory` to vLLM servers and reads their blocks.
 * @throws `KV_SIDE_CHANNEL_BIND_FAILED`, `KV_MEMORY_INVALID`, the errors of the transport.
 */
export async function openTier(options: TierOptions): Promise<Tier> {
  const { landingBlocks = 256, handshakeKeys } = options;
  const { clock, log } = ambient(options);
  const sideChannel = zmqSideChannel({
    clock,
    log,
    handshakeKeys,
    maxRequestBytes: MESSAGE_LIMITS.maxBytes,
    idleTimeoutMs: 2 ** 31 - 1,
  });
  const blocks = await TierBlocks.open({ ...options, landingBlocks });
  const tier = new OpenTier(options, clock, log, sideChannel, blocks);
  try {
    await tier.listen();
  } catch (error) {
    await tier.close();
    throw error;
  }
  return tier;
}

class OpenTier implements Tier {
  readonly #options: TierOptions;
  readonly #clock: Clock;
  readonly #log: Log;
  readonly #sideChannel: ZmqSideChannel;
  readonly #blocks: TierBlocks;
  readonly #links: PeerLinks;
  readonly #sessions = new Map<string, TierSession>();
  /** They may still read blocks. */
  readonly #ends = new Map<string, Promise<void>>();
  readonly #backOffs = new Map<string, { delayMs: number; untilMs: number }>();
  readonly #closed = new AbortController();
  #requests = 0;

  constructor(
    options: TierOptions,
    clock: Clock,
    log: Log,
    sideChannel: ZmqSideChannel,
    blocks: TierBlocks,
  ) {
    const { host, port, admits = () => true } = options;
    this.#options = options;
    this.#clock = clock;
    this.#log = log;
    this.#sideChannel = sideChannel;
    this.#blocks = blocks;
    this.#links = new PeerLinks({
      sideChannel,
      host,
      port,
      clock,
      log,
      admits,
      receive: (peerId, bytes) => this.#sessionOf(peerId).receive(bytes),
      lost: (peerId, error) => this.#sessions.get(peerId)?.end(error),
    });
  }

  get localId(): string {
    return this.#links.localId;
  }

  get peers(): readonly string[] {
    return [...this.#sessions.keys()];
  }

  listen(): Promise<void> {
    return this.#links.listen();
  }

  async read(
    peerId: string,
    keys: readonly Uint8Array[],
    take: (key: Uint8Array, bytes: Uint8Array) => void,
    { signal: given }: ReadOptions = {},
  ): Promise<number> {
    const closed = this.#closed.signal;
    const signal = given === undefined ? closed : AbortSignal.any([closed, given]);
    signal.throwIfAborted();
    const { client } = this.#sessionTo(peerId);
    this.#requests += 1;
    const requestId = `${this.localId}#${this.#requests}`;
    let count = 0;
    try {
      for (let isWhole = true; isWhole && count < keys.length; ) {
        const indexes = await this.#blocks.take(keys.length - count, signal);
        let released: Promise<void> = Promise.resolve();
        try {
          const round = keys.slice(count, count + indexes.length);
          const hits = await client.lookup(requestId, round, signal);
          const missing = hits.indexOf(false);
          isWhole = missing < 0;
          const found = isWhole ? round : round.slice(0, missing);
          if (found.length === 0) break;
          const fetch = client.fetch(requestId, found, indexes.slice(0, found.length), signal);
          released = fetch.released;
          await fetch.done;
          for (const [at, key] of found.entries())
            take(key, this.#blocks.landed(indexes[at] as number));
          count += found.length;
        } finally {
          void released.then(() => this.#blocks.giveBack(indexes));
        }
      }
      return count;
    } finally {
      client.finish(requestId);
    }
  }

  async close(): Promise<void> {
    if (this.#closed.signal.aborted) return;
    const closed = new KvError("KV_SIDE_CHANNEL_CLOSED", "P2P tier: this side is closed");
    this.#closed.abort(closed);
    for (const session of this.#sessions.values()) session.end(closed);
    await Promise.all(this.#ends.values());
    await this.#links.closeAll();
    await this.#sideChannel[Symbol.asyncDispose]();
    await this.#blocks.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  /** A new session greets the peer. */
  #sessionTo(peerId: string): TierSession {
    const known = this.#sessions.get(peerId);
    if (known !== undefined) return known;
    const waitMs = (this.#backOffs.get(peerId)?.untilMs ?? 0) - this.#clock.now();
    if (waitMs > 0)
      throw new KvError(
        "KV_HANDSHAKE_BACKED_OFF",
        `P2P tier: ${peerId} has failed lately; it is asked again in ${Math.ceil(waitMs)} ms`,
      );
    this.#links.open(peerId);
    const session = this.#sessionOf(peerId);
    session.greet();
    return session;
  }

  #sessionOf(peerId: string): TierSession {
    const known = this.#sessions.get(peerId);
    if (known !== undefined) return known;
    this.#makeRoom(peerId);
    const { store, blockLengthBytes, fingerprint, hashSeed } = this.#options;
    const { writer, slots, metadata, region } = this.#blocks;
    const session = new TierSession({
      peerId,
      localId: this.localId,
      namespace: { blockLengthBytes, fingerprint, hashSeed },
      region,
      metadata,
      writer,
      slots,
      store,
      maxPinnedBlocks: Math.ceil(slots.count / 2),
      clock: this.#clock,
      log: this.#log,
      previous: this.#ends.get(peerId) ?? Promise.resolve(),
      send: (bytes) => this.#links.send(peerId, bytes),
      ended: (error) => this.#onEnd(session, error),
    });
    this.#sessions.set(peerId, session);
    return session;
  }

  /** @throws `KV_HANDSHAKE_REFUSED` when all peers are busy. */
  #makeRoom(peerId: string): void {
    const { maxPeers = 128 } = this.#options;
    if (this.#sessions.size < maxPeers) return;
    const [idlest] = [...this.#sessions.values()].sort((one, other) => other.idleMs - one.idleMs);
    if (idlest === undefined || idlest.idleMs < IDLE_MS) {
      this.#links.close(peerId);
      throw new KvError(
        "KV_HANDSHAKE_REFUSED",
        `P2P tier: ${peerId} is refused: there are ${maxPeers} peers, and none is idle`,
        { hint: "raise maxPeers" },
      );
    }
    idlest.end(disconnected(idlest.peerId, "it was idle, and others wait"));
  }

  #onEnd(session: TierSession, error: KvError): void {
    const { peerId } = session;
    this.#sessions.delete(peerId);
    const end = session.released.then(() => {
      if (!this.#sessions.has(peerId)) this.#links.close(peerId);
      if (this.#ends.get(peerId) === end) this.#ends.delete(peerId);
    });
    this.#ends.set(peerId, end);
    this.#log.info("tier-peer-left", { peer: peerId, error });
    if (error.code !== "KV_PEER_DISCONNECTED") this.#backOff(peerId);
  }

  /** As vLLM: the first failure costs nothing, and further ones within a minute double the wait. */
  #backOff(peerId: string): void {
    const nowMs = this.#clock.now();
    for (const [id, { untilMs }] of this.#backOffs)
      if (nowMs - untilMs > MAX_BACK_OFF_MS) this.#backOffs.delete(id);
    const last = this.#backOffs.get(peerId);
    const delayMs =
      last === undefined
        ? 0
        : Math.min(Math.max(2 * last.delayMs, MIN_BACK_OFF_MS), MAX_BACK_OFF_MS);
    this.#backOffs.set(peerId, { delayMs, untilMs: nowMs + delayMs });
  }
}
