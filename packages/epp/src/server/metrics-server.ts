import { once } from "node:events";
import { createServer, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import type { PrometheusMetrics } from "@kv/fleet/front-end";
import { KvError } from "@kv/interface";
import { AddressLimit } from "./address-limit.js";

/** Limits of the listener for metrics. */
export const METRICS_LIMITS = {
  connections: 64,
  connectionsPerAddress: 32,
  headersLengthBytes: 16_384,
  requestMs: 10_000,
} as const;

export interface MetricsServerOptions {
  readonly prometheus: PrometheusMetrics;
  readonly status: () => object;
  readonly health: () => Promise<{ readonly ok: boolean; readonly body: object }>;
}

/** Serves `GET /metrics`, `/status` and `/health`. */
export class MetricsServer {
  readonly #server: Server;

  constructor({ prometheus, status, health }: MetricsServerOptions) {
    const { connections, connectionsPerAddress, headersLengthBytes, requestMs } = METRICS_LIMITS;
    const limits = {
      maxHeaderSize: headersLengthBytes,
      headersTimeout: requestMs,
      requestTimeout: requestMs,
      connectionsCheckingInterval: 1_000,
    };
    this.#server = createServer(limits, (request, response) => {
      const send = (code: number, type: string, body: string) =>
        response.writeHead(code, { "content-type": type }).end(body);
      const json = (code: number, body: object) => send(code, "application/json", JSON.stringify(body));
      const path = request.url?.split("?", 1)[0];
      request.resume();
      if (request.method !== "GET") json(405, { error: "only GET is served" });
      else if (path === "/metrics")
        void prometheus.text().then((text) => send(200, prometheus.contentType, text));
      else if (path === "/status") json(200, status());
      else if (path === "/health") void health().then(({ ok, body }) => json(ok ? 200 : 503, body));
      else json(404, { error: "served are /metrics, /status and /health" });
    });
    this.#server.maxConnections = connections;
    const addresses = new AddressLimit(connectionsPerAddress);
    this.#server.on("connection", (socket) => addresses.admit(socket));
  }

  /** Listens. Returns the port. Errors: `KV_CONFIG_INVALID`. */
  async listen(host: string, port: number): Promise<number> {
    try {
      this.#server.listen(port, host);
      await once(this.#server, "listening");
    } catch (cause) {
      const message = `cannot listen on ${host}:${port} for metrics: ${(cause as Error).message}`;
      throw new KvError("KV_CONFIG_INVALID", message, { hint: "give another --metrics-port", cause });
    }
    return (this.#server.address() as AddressInfo).port;
  }

  async close(): Promise<void> {
    const closed = new Promise((resolve) => this.#server.close(resolve));
    this.#server.closeAllConnections();
    await closed;
  }
}
