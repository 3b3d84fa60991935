import {
  type Agent,
  type Clock,
  KvError,
  type Log,
  type PreparedList,
  type Timer,
} from "@kv/interface";
import { ClientRole } from "./client-role.js";
import { decodeMessage, encodeMessage, type MessageOf, type TierMessage } from "./messages.js";
import { type BlockStore, ServerRole } from "./server-role.js";

/** vLLM's `VLLM_P2P_HANDSHAKE_TIMEOUT_S`. */
const HANDSHAKE_MS = 30_000;

/** What peers must have in common. */
export interface Namespace {
  readonly blockLengthBytes: number;
  /** vLLM's, of the model's configuration, as in its `connect`. */
  readonly fingerprint: string;
  /** The first input of block hashes: `PYTHONHASHSEED`, or vLLM's own value. */
  readonly hashSeed: string;
}

/** Peers write into it. */
export interface Region {
  readonly address: number;
  readonly numBlocks: number;
}

export interface SessionOptions {
  readonly peerId: string;
  /** The `host:port` that peers dial. */
  readonly localId: string;
  readonly namespace: Namespace;
  readonly region: Region;
  /** Metadata of the agent whose only memory is `region`. */
  readonly metadata: Uint8Array;
  /** It WRITEs from the served blocks. Nobody gets its metadata. */
  readonly writer: Agent;
  readonly slots: PreparedList;
  readonly store: BlockStore;
  readonly maxPinnedBlocks: number;
  readonly clock: Clock;
  readonly log: Log;
  /** @throws `KV_PEER_DISCONNECTED` when the peer does not read. */
  readonly send: (bytes: Uint8Array) => void;
  /** The last session with this peer may have used the same agent. */
  readonly previous: Promise<void>;
  /** Called once, before `released` resolves. */
  readonly ended: (error: KvError) => void;
}

interface KnownPeer {
  readonly agentName: string;
  readonly blocks: PreparedList;
}

/**
 * A session of vLLM 0.33's P2P tier (`tiering/p2p/session/session.py`). Each side sends `connect`,
 * checks the other's block length, fingerprint and seed, and acknowledges. The metadata that lets
 * the peer write leaves only after the check.
 */
export class TierSession {
  readonly peerId: string;
  readonly client: ClientRole;
  readonly #server: ServerRole;
  readonly #options: SessionOptions;
  readonly #handshakeTimer: Timer;
  #peer: KnownPeer | undefined;
  #registering: Promise<void> = Promise.resolve();
  #resolveReleased = () => {};
  /** Resolves after the end, when nothing reads blocks. */
  readonly released = new Promise<void>((resolve) => {
    this.#resolveReleased = resolve;
  });
  #isAnnounced = false;
  #isConnected = false;
  /** The peer has registered this side. */
  #isReady = false;
  #queued: TierMessage[] = [];
  #error: KvError | undefined;
  #lastMessageMs: number;

  constructor(options: SessionOptions) {
    const { peerId, clock, store, log, maxPinnedBlocks, writer, slots } = options;
    this.#options = options;
    this.peerId = peerId;
    this.#lastMessageMs = clock.now();
    const send = (message: TierMessage) => this.#sendWhenReady(message);
    this.client = new ClientRole({ peerId, clock, send, leave: (error) => this.end(error) });
    this.#server = new ServerRole({
      store,
      clock,
      log,
      maxPinnedBlocks,
      send,
      peerBlocks: () => this.#peer?.blocks.count ?? 0,
      write: (localIds, remoteIds, signal) =>
        writer.transfer({
          operation: "WRITE",
          local: slots,
          localIds: Int32Array.from(localIds),
          remote: this.#known().blocks,
          remoteIds: Int32Array.from(remoteIds),
          signal,
          timeoutMs: 30_000,
        }),
    });
    this.#handshakeTimer = clock.setTimer(() => {
      this.end(disconnected(peerId, `no handshake within ${HANDSHAKE_MS} ms`));
    }, HANDSHAKE_MS);
  }

  /** In milliseconds; 0 while something is under way. */
  get idleMs(): number {
    const isIdle = this.client.isIdle && this.#server.isIdle;
    return isIdle ? this.#options.clock.now() - this.#lastMessageMs : 0;
  }

  /**
   * Greets a silent peer with an empty answer to no look-up, so that vLLM's session announces
   * itself. It carries what must be equal, for a peer that wants to know first.
   */
  greet(): void {
    const empty = { type: "lookup_resp", kv_request_id: "", keys: [], hits: [] } as const;
    this.#send({ ...empty, keys: [], hits: [], ...wireOf(this.#options.namespace) });
  }

  /** A bad message ends the session. */
  receive(bytes: Uint8Array): void {
    if (this.#error !== undefined) return;
    this.#lastMessageMs = this.#options.clock.now();
    this.#handle(bytes).catch((error: unknown) =>
      this.end(KvError.from(error, "KV_INTERNAL", "a message of the P2P tier")),
    );
  }

  end(error: KvError): void {
    if (this.#error !== undefined) return;
    this.#error = error;
    this.#handshakeTimer.cancel();
    this.#queued = [];
    this.client.close(error);
    this.#options.ended(error);
    void this.#release().then(this.#resolveReleased);
  }

  async #release(): Promise<void> {
    const { writer, log } = this.#options;
    await this.#registering.catch(() => {});
    await this.#server.close();
    // The peer frees the blocks that this side writes into when it hears of the end.
    this.#send({ type: "disconnect" });
    try {
      await this.#peer?.blocks.close();
      if (this.#peer !== undefined) await writer.removeRemote(this.#peer.agentName);
    } catch (problem) {
      log.warn("tier-peer-not-removed", { peer: this.peerId, error: problem });
    }
  }

  async #handle(bytes: Uint8Array): Promise<void> {
    const message = decodeMessage(bytes);
    switch (message.type) {
      case "connect":
        return this.#onConnect(message);
      case "connect_ack":
        return this.#onAcknowledged();
      case "disconnect":
        return this.end(disconnected(this.peerId, "it ended the session"));
      case "lookup_resp":
        return this.#isReady ? this.client.onLookupResponse(message) : this.#onGreeting(message);
      case "transfer_done":
        return this.client.onTransferDone(message);
      case "abort_ack":
        return this.client.onAbortAck(message);
      case "lookup":
        this.#known();
        return this.#server.lookup(message);
      case "fetch":
        this.#known();
        return this.#server.fetch(message);
      case "abort_fetch":
        this.#known();
        return this.#server.abort(message);
    }
  }

  #onGreeting(message: MessageOf<"lookup_resp">): void {
    const { block_len, config_fingerprint, hash_seed } = message;
    if (block_len === undefined || config_fingerprint === undefined || hash_seed === undefined)
      throw malformed(this.peerId, "it answers a look-up before the handshake");
    this.#check({ block_len, config_fingerprint, hash_seed });
    this.#announce();
  }

  async #onConnect(message: MessageOf<"connect">): Promise<void> {
    const { localId, log } = this.#options;
    if (this.#isConnected) throw malformed(this.peerId, "it connects twice");
    this.#isConnected = true;
    if (message.peer_id !== this.peerId)
      throw malformed(this.peerId, `it says that it is ${message.peer_id}`);
    this.#check(message);
    this.#announce();

    this.#registering = this.#register(message);
    await this.#registering;
    if (this.#error !== undefined) return;
    log.info("tier-peer-connected", { peer: this.peerId, blocks: message.num_blocks });
    this.#send({ type: "connect_ack", peer_id: localId });
  }

  async #register(message: MessageOf<"connect">): Promise<void> {
    const { writer, previous } = this.#options;
    await previous;
    const { agent_metadata, base_addr: address, block_len: length, num_blocks: blocks } = message;
    const agentName = await writer.addRemote(agent_metadata);
    this.#peer = {
      agentName,
      blocks: await writer.prepareRemote(agentName, {
        memoryType: "DRAM",
        rows: Float64Array.of(address, length, 0, length, blocks),
      }),
    };
  }

  #onAcknowledged(): void {
    if (!this.#isAnnounced) throw malformed(this.peerId, "it acknowledges what was not sent");
    this.#isReady = true;
    this.#handshakeTimer.cancel();
    for (const message of this.#queued) this.#send(message);
    this.#queued = [];
  }

  /** @throws `KV_HANDSHAKE_INCOMPATIBLE` with both values. */
  #check(said: ReturnType<typeof wireOf>): void {
    for (const [field, ours] of Object.entries(wireOf(this.#options.namespace))) {
      const theirs = said[field as keyof typeof said];
      if (theirs === ours) continue;
      throw new KvError(
        "KV_HANDSHAKE_INCOMPATIBLE",
        `P2P tier: ${field} of ${this.peerId} is ${theirs}, of this side ${ours}`,
        { hint: HINTS[field as keyof typeof said], details: { field, theirs, ours } },
      );
    }
  }

  #announce(): void {
    if (this.#isAnnounced) return;
    this.#isAnnounced = true;
    const { localId, metadata, region, namespace } = this.#options;
    this.#send({
      type: "connect",
      peer_id: localId,
      agent_metadata: metadata as MessageOf<"connect">["agent_metadata"],
      base_addr: region.address,
      num_blocks: region.numBlocks,
      ...wireOf(namespace),
    });
  }

  #known(): KnownPeer {
    if (this.#peer === undefined) throw malformed(this.peerId, "it asks before the handshake");
    return this.#peer;
  }

  #sendWhenReady(message: TierMessage): void {
    if (this.#isReady) this.#send(message);
    else this.#queued.push(message);
  }

  #send(message: TierMessage): void {
    try {
      this.#options.send(encodeMessage(message));
    } catch (error) {
      this.end(KvError.from(error, "KV_PEER_DISCONNECTED", "a message of the P2P tier"));
    }
  }
}

const wireOf = ({ blockLengthBytes, fingerprint, hashSeed }: Namespace) => {
  return {
    block_len: blockLengthBytes,
    config_fingerprint: fingerprint,
    hash_seed: hashSeed,
  };
};

const HINTS = {
  block_len: "both sides must keep blocks of the same layers, dtype and tokens",
  config_fingerprint: "both sides must serve the same model with the same settings of its KV cache",
  hash_seed: "set PYTHONHASHSEED to the same value for all peers, or for none",
};

export function disconnected(peerId: string, why: string): KvError {
  return new KvError("KV_PEER_DISCONNECTED", `P2P tier: ${peerId}: ${why}`, {
    details: { peer: peerId },
  });
}

const malformed = (peerId: string, why: string): KvError =>
  new KvError("KV_WIRE_MALFORMED", `P2P tier: ${peerId}: ${why}`);
