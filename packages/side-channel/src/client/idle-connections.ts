import type { Clock, Timer } from "@kv/interface";
import type { ZmqConnection } from "./connection.js";

const IDLE_MS = 10_000;

/**
 * Idle established connections, kept because connecting takes longer than a request and its reply.
 */
export class IdleConnections {
  readonly #clock: Clock;
  readonly #perPeer: number;
  readonly #peers = new Map<string, Map<ZmqConnection, Timer>>();
  #closed = false;

  /** Keeps at most `perPeer` connections of each peer. */
  constructor(clock: Clock, perPeer: number) {
    this.#clock = clock;
    this.#perPeer = perPeer;
  }

  take(peer: string): ZmqConnection | undefined {
    const connection = [...(this.#peers.get(peer)?.keys() ?? [])].at(-1);
    if (connection === undefined) return undefined;
    this.#leave(peer, connection);
    connection.keepAlive(true);
    return connection;
  }

  /**
   * Keeps an idle connection for a limited time. Closes it when there are enough idle ones, or when
   * it is lost.
   */
  keep(peer: string, connection: ZmqConnection): void {
    const idle = this.#peers.get(peer) ?? new Map<ZmqConnection, Timer>();
    if (this.#closed || connection.lost || idle.size >= this.#perPeer) {
      connection.close();
      return;
    }
    this.#peers.set(peer, idle);
    connection.onLost = () => this.#end(peer, connection);
    connection.keepAlive(false);
    idle.set(
      connection,
      this.#clock.setTimer(() => this.#end(peer, connection), IDLE_MS),
    );
  }

  close(): void {
    this.#closed = true;
    for (const [peer, idle] of this.#peers)
      for (const connection of [...idle.keys()]) this.#end(peer, connection);
  }

  #end(peer: string, connection: ZmqConnection): void {
    this.#leave(peer, connection);
    connection.close();
  }

  #leave(peer: string, connection: ZmqConnection): void {
    const idle = this.#peers.get(peer);
    idle?.get(connection)?.cancel();
    idle?.delete(connection);
    if (idle?.size === 0) this.#peers.delete(peer);
  }
}
