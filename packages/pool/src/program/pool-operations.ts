import { KvError } from "@kv/interface";
import { Counter, Gauge, Registry } from "prom-client";
import { z } from "zod";
import type { Pool, PoolStatus } from "../pool.js";

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

const METRICS: readonly (readonly [
  Metric: typeof Gauge | typeof Counter,
  name: string,
  help: string,
  value: (status: PoolStatus) => number,
])[] = [
  [Gauge, "kv_pool_blocks", "Blocks that peers can find", ({ blocks }) => blocks],
  [Gauge, "kv_pool_memory_blocks", "Blocks in memory", (status) => status.blocks_in_memory],
  [Gauge, "kv_pool_file_blocks", "Blocks in the file", (status) => status.blocks_in_file],
  [Gauge, "kv_pool_memory_limit_blocks", "The most blocks in memory", ({ slots }) => slots],
  [Gauge, "kv_pool_file_limit_blocks", "The most blocks in the file", ({ places }) => places],
  [Gauge, "kv_pool_pinned_blocks", "Blocks that peers hold", ({ pinned }) => pinned],
  [Gauge, "kv_pool_peers", "Peers with a session", ({ peers }) => peers.length],
  [Gauge, "kv_pool_waiting_copies", "Prefixes that wait to be copied", ({ waiting }) => waiting],
  [Counter, "kv_pool_found_blocks_total", "Looked up and found", ({ found }) => found],
  [Counter, "kv_pool_missing_blocks_total", "Looked up and not found", ({ missing }) => missing],
  [Counter, "kv_pool_copied_blocks_total", "Copied from engines", ({ copied }) => copied],
  [Counter, "kv_pool_failed_copies_total", "Copies that failed", ({ failed }) => failed],
  [
    Counter,
    "kv_pool_dropped_copies_total",
    "Prefixes that were not copied because too many waited",
    ({ dropped }) => dropped,
  ],
  [
    Counter,
    "kv_pool_unknown_blocks_total",
    "Blocks of events whose place in a prompt is not known",
    ({ unknown }) => unknown,
  ],
  [Counter, "kv_pool_evicted_blocks_total", "Left for others", ({ evicted }) => evicted],
  [
    Counter,
    "kv_pool_damaged_blocks_total",
    "Blocks of the file with a wrong checksum, which were not served",
    ({ damaged }) => damaged,
  ],
];

/** A registry that reads the pool's state at each scrape. */
function poolMetrics(status: () => PoolStatus) {
  const registry = new Registry();
  const metrics = METRICS.map(([Metric, name, help, value]) => {
    const metric = new Metric({ name, help, registers: [registry] });
    return { metric, value };
  });
  return {
    contentType: registry.contentType,
    text(): Promise<string> {
      const read = status();
      for (const { metric, value } of metrics) {
        metric.reset();
        metric.inc(value(read));
      }
      return registry.metrics();
    },
  };
}
