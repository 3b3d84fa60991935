import type { Server } from "node:http";
import type { Socket } from "node:net";

/**
 * Closes the connections of a server. Node's `closeIdleConnections` does not close connections without a first request, and an aborted
 * fetch opens one of these.
 */
export class ConnectionTracker {
  readonly #open = new Set<Socket>();
  readonly #busy = new Set<Socket>();
  #isClosing = false;

  constructor(server: Server) {
    server.on("connection", (socket: Socket) => {
      this.#open.add(socket);
      socket.once("close", () => this.#open.delete(socket));
    });
    server.on("request", ({ socket }, response) => {
      this.#busy.add(socket);
      response.once("close", () => {
        this.#busy.delete(socket);
        if (this.#isClosing) socket.destroy();
      });
    });
  }

  /** Closes connections without a pending response now, and the others as soon as their response has been sent. */
  closeIdle(): void {
    this.#isClosing = true;
    for (const socket of this.#open) if (!this.#busy.has(socket)) socket.destroy();
  }

  closeAll(): void {
    for (const socket of this.#open) socket.destroy();
  }
}
