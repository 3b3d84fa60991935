import type { PrometheusMetrics } from "@kv/fleet/front-end";
import { HttpServer, send, sendJson, type Turn } from "@kv/http";
import type { Clock } from "@kv/interface";

/** Limits of the listener for metrics. */
export const METRICS_LIMITS = {
  connections: 64,
  connectionsPerAddress: 32,
  headersLengthBytes: 16_384,
  requestMs: 10_000,
} as const;

export interface MetricsServerOptions {
  readonly clock: Clock;
  readonly prometheus: PrometheusMetrics;
  readonly status: () => object;
  readonly health: () => Promise<{ readonly ok: boolean; readonly body: object }>;
}

/** The server of `GET /metrics`, `/status` and `/health`. */
export function metricsServer({ clock, prometheus, status, health }: MetricsServerOptions): HttpServer {
  const { requestMs } = METRICS_LIMITS;
  const limits = { pipelinedRequests: 1, headersMs: requestMs, receiveMs: requestMs, keepAliveMs: 5_000 };
  const serve = async ({ request, response, path }: Turn) => {
    if (request.method !== "GET") sendJson(response, 405, { error: "only GET is served" });
    else if (path === "/metrics") send(response, 200, prometheus.contentType, await prometheus.text());
    else if (path === "/status") sendJson(response, 200, status());
    else if (path === "/health") {
      const { ok, body } = await health();
      sendJson(response, ok ? 200 : 503, body);
    } else sendJson(response, 404, { error: "served are /metrics, /status and /health" });
  };
  return new HttpServer({ limits: { ...METRICS_LIMITS, ...limits }, clock, serve });
}
