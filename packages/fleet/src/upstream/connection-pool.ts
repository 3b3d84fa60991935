import { buildConnector, Client, type Dispatcher } from "undici";

/** More idle connections than these to one instance are closed. */
const MOST_IDLE = 256;

/** What `ConnectionPool` is made of. */
export interface ConnectionPoolOptions {
  /** The time to open a connection, in ms. */
  readonly connectMs: number;
  /** Called with the origin of an instance that has closed a kept connection. */
  readonly onClosed?: ((origin: string) => void) | undefined;
}

/**
 * Kept HTTP/1.1 connections, each with one request at a time. A request takes the connection that has been idle longest, so that all those which the
 * last seconds needed stay open. undici's own pool takes the first idle one: the others close after 4 s, and the next burst opens them all at once. It
 * also walks past every busy connection to find an idle one, twice for each request.
 */
export class ConnectionPool {
  readonly #clientOptions: Client.Options;
  readonly #onClosed: ConnectionPoolOptions["onClosed"];
  readonly #clients = new Set<Client>();
  #closed = false;
  /** By origin, the one that has been idle longest first. */
  readonly #idle = new Map<string, Client[]>();

  constructor({ connectMs, onClosed }: ConnectionPoolOptions) {
    this.#clientOptions = {
      connect: buildConnector({ timeout: connectMs }),
      headersTimeout: 0,
      bodyTimeout: 0,
      maxHeaderSize: 64 * 1024,
    };
    this.#onClosed = onClosed;
  }

  /** Sends a request to `origin`, on a new connection if all others are busy. */
  dispatch(origin: string, request: Dispatcher.DispatchOptions, handler: Dispatcher.DispatchHandler): void {
    const client = this.#idle.get(origin)?.shift() ?? this.#open(origin);
    client.dispatch(request, handler);
    // A request that undici refuses has failed already, and no "drain" follows.
    if (client.stats.size === 0) this.#release(origin, client);
  }

  /** Closes all connections. Their requests fail, and so do later ones. */
  async close(): Promise<void> {
    this.#closed = true;
    await Promise.all([...this.#clients].map((client) => client.destroy()));
  }

  #open(origin: string): Client {
    const client = new Client(origin, this.#clientOptions);
    this.#clients.add(client);
    if (this.#closed) void client.destroy();
    client.on("drain", () => this.#release(origin, client));
    client.on("disconnect", (_origin, _targets, { code }) => {
      const idle = this.#idle.get(origin) ?? [];
      const at = idle.indexOf(client);
      if (at !== -1) {
        idle.splice(at, 1);
        this.#clients.delete(client);
        if (idle.length === 0) this.#idle.delete(origin);
      }
      // Connections that this side closes, for instance idle ones, have other codes.
      if (code === "UND_ERR_SOCKET") this.#onClosed?.(origin);
    });
    return client;
  }

  #release(origin: string, client: Client): void {
    const idle = this.#idle.get(origin) ?? [];
    if (client.stats.connected && idle.length < MOST_IDLE) {
      idle.push(client);
      this.#idle.set(origin, idle);
      return;
    }
    if (idle.length === 0) this.#idle.delete(origin);
    this.#clients.delete(client);
    client.close(() => undefined);
  }
}
