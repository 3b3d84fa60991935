import type { IncomingMessage, ServerResponse } from "node:http";
import type { Socket } from "node:net";
import type { HttpLimits } from "./limits.js";

type ConnectionLimits = Pick<
  HttpLimits,
  "maxConnections" | "maxConnectionsPerAddress" | "maxRequestsPerConnection"
>;

/** An open connection. */
interface Connection {
  readonly client: Client;
  /** Responses that are not complete. */
  readonly responses: Set<ServerResponse>;
}

/** What one remote address has open. */
interface Client {
  readonly address: string;
  connections: number;
  requests: number;
}

const REFUSAL =
  "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";

/**
 * The open connections of a server, bounded in all and per address. Node's `closeIdleConnections` does not close connections without a first
 * request, and an aborted fetch opens one of these.
 */
export class Connections {
  /** Oldest first. */
  readonly #open = new Map<Socket, Connection>();
  readonly #clients = new Map<string, Client>();
  readonly #limits: ConnectionLimits;
  #requests = 0;
  #isClosing = false;

  constructor(limits: ConnectionLimits) {
    this.#limits = limits;
  }

  /** Requests without a complete response. */
  get requests(): number {
    return this.#requests;
  }

  /** Requests without a complete response of the address that a connection comes from. */
  requestsOfAddress(socket: Socket): number {
    return this.#open.get(socket)?.client.requests ?? 0;
  }

  /** Takes a new connection, or refuses it. */
  accept(socket: Socket): void {
    const address = socket.remoteAddress ?? "";
    if (!this.#hasRoom(address)) {
      refuse(socket);
      return;
    }
    const client = this.#clients.get(address) ?? { address, connections: 0, requests: 0 };
    this.#clients.set(address, client);
    client.connections += 1;
    const responses = new Set<ServerResponse>();
    this.#open.set(socket, { client, responses });
    socket.once("close", () => {
      this.#forget(socket);
      closeWaiting(responses);
    });
  }

  #hasRoom(address: string): boolean {
    const { maxConnections, maxConnectionsPerAddress } = this.#limits;
    if ((this.#clients.get(address)?.connections ?? 0) >= maxConnectionsPerAddress)
      return this.#closeOldestIdle(address);
    return this.#open.size < maxConnections || this.#closeOldestIdle();
  }

  /** Closes the oldest connection without a request, of an address or of all. Returns whether there was one. */
  #closeOldestIdle(address?: string): boolean {
    for (const [socket, connection] of this.#open) {
      if (connection.responses.size > 0 || (address !== undefined && connection.client.address !== address))
        continue;
      this.#forget(socket);
      socket.destroy();
      return true;
    }
    return false;
  }

  #forget(socket: Socket): void {
    const connection = this.#open.get(socket);
    if (connection === undefined) return;
    this.#open.delete(socket);
    const { client } = connection;
    client.connections -= 1;
    if (client.connections === 0) this.#clients.delete(client.address);
  }

  /**
   * Counts a request. Returns whether it is to be served; above the limit of a connection, the connection ends. One chunk of pipelined requests has
   * up to 2,000 of them.
   */
  begin({ socket }: IncomingMessage, response: ServerResponse): boolean {
    const connection = this.#open.get(socket);
    if (connection === undefined) return false;
    const { client, responses } = connection;
    if (responses.size >= this.#limits.maxRequestsPerConnection) {
      this.#forget(socket);
      const [current] = responses;
      if (current?.headersSent === true) socket.destroy();
      else refuse(socket);
      return false;
    }
    responses.add(response);
    client.requests += 1;
    this.#requests += 1;
    response.once("close", () => {
      responses.delete(response);
      client.requests -= 1;
      this.#requests -= 1;
      if (this.#isClosing && responses.size === 0) socket.destroy();
    });
    return true;
  }

  /** Closes connections without a pending response now, and the others as soon as their response has been sent. */
  closeIdle(): void {
    this.#isClosing = true;
    for (const [socket, { responses }] of this.#open) if (responses.size === 0) socket.destroy();
  }

  /** Closes every connection now. */
  closeAll(): void {
    for (const socket of this.#open.keys()) socket.destroy();
  }
}

/** Ends a connection with an error. The kernel takes these few bytes at once, and nothing more of a flood is read. */
function refuse(socket: Socket): void {
  socket.on("error", () => {});
  socket.write(REFUSAL);
  socket.destroy();
}

/**
 * Closes the responses of a closed connection that waited for an earlier one of it (HTTP pipelining). Node emits `close` only for the response
 * that had the socket (seen with Node 20.20), so nobody would learn that the client is gone.
 */
function closeWaiting(responses: ReadonlySet<ServerResponse>): void {
  for (const response of [...responses]) {
    response.destroy();
    response.emit("close");
  }
}
