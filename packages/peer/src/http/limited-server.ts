import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import type { Socket } from "node:net";

/** Bounds of an HTTP server. */
export interface HttpLimits {
  /** Open connections; a further one gets 503. */
  readonly maxConnections: number;
  /** Open connections of one remote address; a further one gets 503. */
  readonly maxConnectionsPerAddress: number;
  /** Requests without a complete answer; a further one gets 503. */
  readonly maxRequests: number;
  /** The same of one remote address. */
  readonly maxRequestsPerAddress: number;
  /** Bytes of a request's headers; more get 431. */
  readonly maxHeaderBytes: number;
  /** For a request's headers, in ms; later ones get 408. */
  readonly headerTimeoutMs: number;
  /** For a whole request, in ms; a later one gets 408. */
  readonly requestTimeoutMs: number;
  /** For which a connection stays open without a request, in ms. */
  readonly idleTimeoutMs: number;
}

/** Open connections and requests of one remote address. */
interface Client {
  connections: number;
  requests: number;
}

const REFUSAL =
  "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";

/** Creates an HTTP server with limits. `serve` answers the requests within them. */
export function createLimitedServer(
  limits: HttpLimits,
  serve: (request: IncomingMessage, response: ServerResponse) => void,
): Server {
  const clients = new Map<string, Client>();
  const bySocket = new WeakMap<Socket, Client & { readonly client: Client }>();
  let connections = 0;
  let requests = 0;
  const server = createServer({
    maxHeaderSize: limits.maxHeaderBytes,
    headersTimeout: limits.headerTimeoutMs,
    requestTimeout: limits.requestTimeoutMs,
    keepAliveTimeout: limits.idleTimeoutMs,
    connectionsCheckingInterval: Math.min(1000, limits.headerTimeoutMs),
  });
  server.on("connection", (socket) => {
    const address = socket.remoteAddress ?? "";
    const client = clients.get(address) ?? { connections: 0, requests: 0 };
    if (connections >= limits.maxConnections || client.connections >= limits.maxConnectionsPerAddress) {
      refuse(socket);
      return;
    }
    clients.set(address, client);
    connections += 1;
    client.connections += 1;
    const own = { client, connections: 1, requests: 0 };
    bySocket.set(socket, own);
    socket.once("close", () => {
      bySocket.delete(socket);
      connections -= 1;
      client.connections -= 1;
      // Of pipelined requests that wait for an earlier answer, Node ends no response.
      requests -= own.requests;
      client.requests -= own.requests;
      if (client.connections === 0) clients.delete(address);
    });
  });
  server.on("request", (request, response) => {
    const { socket } = request;
    const own = bySocket.get(socket);
    if (own === undefined) return;
    const { client } = own;
    if (requests >= limits.maxRequests || client.requests >= limits.maxRequestsPerAddress) {
      refuse(socket);
      return;
    }
    requests += 1;
    client.requests += 1;
    own.requests += 1;
    response.once("close", () => {
      if (!bySocket.has(socket)) return;
      requests -= 1;
      client.requests -= 1;
      own.requests -= 1;
    });
    serve(request, response);
  });
  return server;
}

/** Ends a connection with 503. The kernel takes these few bytes at once. */
function refuse(socket: Socket): void {
  socket.on("error", () => {});
  socket.write(REFUSAL);
  socket.destroy();
}
