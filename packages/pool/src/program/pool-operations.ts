import { KvError } from "@kv/interface";
import { Counter, Gauge, Registry } from "prom-client";
import { z } from "zod";
import type { Pool, PoolStatus } from "../pool.js";
import METRICS from "./metrics.json" with { type: "json" };

/** Routers wait a little longer. */
const COPY_MS = 25_000;

/** What a pool's admin port serves to operators and routers. */
export const poolOperations = (pool: Pool) => ({
  status: () => pool.status(),
  metrics: poolMetrics(() => pool.status()),
  health: async () => {
    const { draining } = pool.status();
    return { ok: !draining, body: { draining } };
  },
  further: {
    "GET /blocks": (query: URLSearchParams) =>
      pool.content(query.get("epoch") ?? "", Number(query.get("after") ?? 0)),
    "POST /copies": async (_: URLSearchParams, body: unknown) => ({
      copied: await pool.copyFrom(peerIn(body), COPY_MS),
    }),
  },
});

function peerIn(body: unknown): string {
  const { data, error } = z.strictObject({ peer: z.string().max(512) }).safeParse(body);
  if (data !== undefined) return data.peer;
  const problem = z.prettifyError(error);
  throw new KvError("KV_REQUEST_INVALID", `the body is not {"peer": "HOST:PORT"}: ${problem}`);
}

/** A registry that reads the pool's state at each scrape. */
function poolMetrics(status: () => PoolStatus) {
  const registry = new Registry();
  const metrics = METRICS.map(({ type, name, help, member }) => {
    const Metric = type === "gauge" ? Gauge : Counter;
    return { metric: new Metric({ name, help, registers: [registry] }), member };
  });
  return {
    contentType: registry.contentType,
    text(): Promise<string> {
      // `peers` is a list.
      const read = { ...status(), peers: status().peers.length };
      for (const { metric, member } of metrics) {
        metric.reset();
        metric.inc(Number(read[member as keyof PoolStatus]));
      }
      return registry.metrics();
    },
  };
}
