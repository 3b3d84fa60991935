import type { Server } from "node:http";
import type { Socket } from "node:net";

/** Lets a server close without waiting for clients that keep a connection and ask nothing. */
export interface Connections {
  /** Ends every connection that has no answer under way, now and as soon as that is so. */
  endIdle(): void;
  endAll(): void;
}

/**
 * Keeps book itself, as Node's own `closeIdleConnections` leaves those alone that have not asked anything yet, and a fetch that
 * was aborted opens one of these.
 */
export function trackConnections(server: Server): Connections {
  const open = new Set<Socket>();
  const busy = new Set<Socket>();
  let ending = false;
  server.on("connection", (socket: Socket) => {
    open.add(socket);
    socket.once("close", () => open.delete(socket));
  });
  server.on("request", ({ socket }, response) => {
    busy.add(socket);
    response.once("close", () => {
      busy.delete(socket);
      if (ending) socket.destroy();
    });
  });
  return {
    endIdle() {
      ending = true;
      for (const socket of open) if (!busy.has(socket)) socket.destroy();
    },
    endAll() {
      for (const socket of open) socket.destroy();
    },
  };
}
