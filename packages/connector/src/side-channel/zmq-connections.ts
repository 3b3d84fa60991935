import type { Clock, Timer } from "@kv/interface";
import { Request } from "zeromq";
import { asBuffer, type ZmqEndpoint } from "./zmq-endpoint.js";

export type ConnectionStage = "connecting" | "greeting" | "established";

/** A connection to a listener, for one request at a time. After a missing reply it cannot be used again. */
export class ZmqConnection {
  readonly #socket: Request;
  readonly #greeted: Promise<void>;
  #stage: ConnectionStage = "connecting";
  #lost = false;
  /** Called when the connection is refused or lost. */
  onLost: () => void = () => {};

  constructor({ url, ipv6 }: ZmqEndpoint, maxReplyBytes: number) {
    this.#socket = new Request({ linger: 0, ipv6, maxMessageSize: maxReplyBytes });
    const { events } = this.#socket;
    events.on("connect", () => {
      this.#stage = "greeting";
    });
    // ZMQ would retry forever. The peer answered a moment ago, at least over HTTP, and now its port is closed.
    events.on("connect:retry", () => {
      if (this.#stage === "connecting") this.onLost();
    });
    // A reply that arrived before the disconnect is delivered before the next turn of the event loop.
    events.on("disconnect", () => {
      this.#lost = true;
      setImmediate(() => this.onLost());
    });
    this.#greeted = new Promise((resolve) => {
      events.on("handshake", () => {
        this.#stage = "established";
        resolve();
      });
    });
    this.#socket.connect(url);
  }

  get stage(): ConnectionStage {
    return this.#stage;
  }

  /** The connection was established and is lost. ZMQ reconnects by itself, possibly to another process on that port. */
  get lost(): boolean {
    return this.#lost;
  }

  /** Resolves when the connection is established, so that a request's timeout covers only the exchange. */
  greeted(): Promise<void> {
    return this.#greeted;
  }

  async exchange(frames: readonly Uint8Array[]): Promise<readonly Uint8Array[]> {
    await this.#socket.send(frames.map(asBuffer));
    return await this.#socket.receive();
  }

  close(): void {
    this.onLost = () => {};
    this.#socket.close();
  }
}

const IDLE_MS = 10_000;
const PER_PEER = 4;

/** Idle established connections, kept because connecting takes longer than a request and its reply. */
export interface IdleConnections {
  take(peer: string): ZmqConnection | undefined;
  /** Keeps an idle connection for a limited time. Closes it when there are enough idle ones, or when it is lost. */
  keep(peer: string, connection: ZmqConnection): void;
  close(): void;
}

export function createIdleConnections(clock: Clock): IdleConnections {
  const peers = new Map<string, Map<ZmqConnection, Timer>>();
  let closed = false;

  function leave(peer: string, connection: ZmqConnection): void {
    const idle = peers.get(peer);
    idle?.get(connection)?.cancel();
    idle?.delete(connection);
    if (idle?.size === 0) peers.delete(peer);
  }
  function end(peer: string, connection: ZmqConnection): void {
    leave(peer, connection);
    connection.close();
  }

  return {
    take(peer) {
      const connection = [...(peers.get(peer)?.keys() ?? [])].at(-1);
      if (connection !== undefined) leave(peer, connection);
      return connection;
    },
    keep(peer, connection) {
      const idle = peers.get(peer) ?? new Map<ZmqConnection, Timer>();
      if (closed || connection.lost || idle.size >= PER_PEER) {
        connection.close();
        return;
      }
      peers.set(peer, idle);
      connection.onLost = () => end(peer, connection);
      idle.set(
        connection,
        clock.setTimer(() => end(peer, connection), IDLE_MS),
      );
    },
    close() {
      closed = true;
      for (const [peer, idle] of peers) for (const connection of [...idle.keys()]) end(peer, connection);
    },
  };
}
