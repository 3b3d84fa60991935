import type { Clock, Timer } from "@kv/interface";
import type { ZmqConnection } from "./zmq-connection.js";

const IDLE_MS = 10_000;
const PER_PEER = 4;

/** Connections that stand and have nothing to do: to make one takes longer than a question and its answer. */
export interface IdleConnections {
  take(peer: string): ZmqConnection | undefined;
  /** For a while; closed when there are enough of them, or when it is lost. */
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
