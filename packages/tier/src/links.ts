import { type Clock, KvError, type Log, type SideChannelListener } from "@kv/interface";
import type { ZmqConnection, ZmqPeer, ZmqSideChannel } from "@kv/side-channel";
import { disconnected } from "./session.js";

/** vLLM's `_SNDHWM`: queued until a peer connects. */
const MAX_QUEUED = 1_000;
const MAX_UNSENT_BYTES = 32 * 2 ** 20;
/** vLLM's `_DEALER_LINGER_MS`: a closed connection may still connect and send. */
const LINGER_MS = 500;

export interface LinksOptions {
  readonly sideChannel: ZmqSideChannel;
  readonly host: string;
  readonly port: number;
  readonly clock: Clock;
  readonly log: Log;
  /** Whether this address may use this name. */
  readonly admits: (peerId: string, address: string) => boolean;
  readonly receive: (peerId: string, bytes: Uint8Array) => void;
  readonly lost: (peerId: string, error: KvError) => void;
}

/** The peer sends over its own connection, this side over `dialed`. */
interface Link {
  readonly dialed: ZmqConnection;
  readonly queued: Uint8Array[];
  isEstablished: boolean;
  from: ZmqPeer | undefined;
}

/**
 * The P2P tier's connections (vLLM's `control/zmq.py`). Each side binds a ROUTER at the address
 * that names it, and dials others with a DEALER of that routing id.
 */
export class PeerLinks {
  readonly #options: LinksOptions;
  readonly #links = new Map<string, Link>();
  #listener: SideChannelListener | undefined;
  #localId = "";

  constructor(options: LinksOptions) {
    this.#options = options;
  }

  get localId(): string {
    return this.#localId;
  }

  /** @throws `KV_SIDE_CHANNEL_BIND_FAILED`. */
  async listen(): Promise<void> {
    const { sideChannel, host, port } = this.#options;
    this.#listener = await sideChannel.listen({
      host,
      port,
      answer: (frames, from) => this.#receive(frames, from),
    });
    this.#localId = `${host}:${this.#listener.port}`;
  }

  /** No effect if connected. */
  open(peerId: string): void {
    if (!this.#links.has(peerId)) this.#dial(peerId);
  }

  /** @throws `KV_PEER_DISCONNECTED`. */
  send(peerId: string, bytes: Uint8Array): void {
    const link = this.#links.get(peerId);
    if (link === undefined) throw disconnected(peerId, "there is no connection");
    const { dialed, queued, isEstablished } = link;
    if (queued.length >= MAX_QUEUED || dialed.unsentBytes > MAX_UNSENT_BYTES)
      throw disconnected(peerId, "it does not read what it is sent");
    if (isEstablished) dialed.send([bytes]);
    else queued.push(bytes);
  }

  /** Sends what is queued first. */
  close(peerId: string): void {
    const link = this.#links.get(peerId);
    if (link === undefined) return;
    this.#links.delete(peerId);
    const { dialed, isEstablished, queued } = link;
    if (isEstablished || queued.length === 0) dialed.end();
    else this.#options.clock.setTimer(() => dialed.close(), LINGER_MS);
  }

  async closeAll(): Promise<void> {
    await this.#listener?.close();
    for (const peerId of [...this.#links.keys()]) this.close(peerId);
  }

  #dial(peerId: string): Link {
    const { hostname, port } = new URL(`tcp://${peerId}`);
    const dialed = this.#options.sideChannel.dial({
      host: hostname.replace(/^\[|\]$/g, ""),
      port: Number(port),
      identity: this.#localId,
    });
    const link: Link = { dialed, queued: [], isEstablished: false, from: undefined };
    this.#links.set(peerId, link);
    dialed.onEstablished = () => {
      link.isEstablished = true;
      for (const bytes of link.queued.splice(0)) dialed.send([bytes]);
      if (this.#links.get(peerId) !== link) dialed.end();
    };
    dialed.onLost = ({ why, cause }) => {
      if (this.#links.get(peerId) !== link) return;
      this.#links.delete(peerId);
      this.#options.lost(peerId, KvError.from(cause, "KV_PEER_DISCONNECTED", `P2P tier: ${why}`));
    };
    return link;
  }

  #receive(frames: readonly Uint8Array[], from: ZmqPeer): undefined {
    const { admits, receive, lost, log } = this.#options;
    const [bytes] = frames;
    const peerId = from.identity;
    if (bytes === undefined || frames.length > 1)
      throw new KvError("KV_WIRE_MALFORMED", `P2P tier: a message of ${frames.length} frames`);
    if (!/^[\w.:[\]-]{1,255}:[1-9]\d{0,4}$/.test(peerId) || !admits(peerId, from.address))
      throw new KvError(
        "KV_HANDSHAKE_REFUSED",
        `P2P tier: a peer at ${from.address} calls itself ${JSON.stringify(peerId.slice(0, 64))}`,
        { hint: "its side channel's host must be an address of its own that this side can dial" },
      );

    const known = this.#links.get(peerId);
    if (known?.from !== undefined && known.from !== from) {
      // The peer has restarted, or somebody takes its name.
      if (known.from.isOpen) {
        log.warn("tier-name-in-use", { peer: peerId, address: from.address });
        return;
      }
      this.close(peerId);
      lost(peerId, disconnected(peerId, "it has connected again"));
    }
    const link = this.#links.get(peerId) ?? this.#dial(peerId);
    link.from = from;
    receive(peerId, bytes);
  }
}
