import type { Clock } from "@kv/interface";
import { z } from "zod";
import type { EngineServer } from "../http/engine-server.js";
import type { MetricSamples } from "../http/prometheus-text.js";

interface UsedBlocks {
  readonly used: number;
  readonly total: number;
  readonly expired: number;
}

/** Logical blocks that a server still holds after a load. */
export type LeakReport = z.infer<typeof leakSchema>;

export const leakSchema = z.object({
  before: z.number().describe("Blocks in use before the load."),
  afterTold: z.number().describe("Blocks in use after P had time to free what it was notified of."),
  atEnd: z.number().describe("Blocks in use after all leases had to be over."),
  heldAlthoughTold: z
    .number()
    .describe("Blocks that P kept although it was notified that they were read."),
  leaked: z.number().describe("Blocks in use at the end beyond those before the load."),
  freedMs: z
    .number()
    .optional()
    .describe("How long P took to free what it was notified of; absent when it did not."),
  allFreedMs: z
    .number()
    .optional()
    .describe("How long P took to free all blocks; absent when it did not."),
  expiredRequests: z
    .number()
    .describe("Requests whose lease ended during the load, as P counts them (once per rank)."),
});

const POLL_MS = 250;
const LEASE_MARGIN_MS = 10_000;

/** Undefined when the server does not publish `vllm:kv_cache_usage_perc`. */
export async function readUsedBlocks(server: EngineServer): Promise<UsedBlocks | undefined> {
  const samples = await server.metrics().catch(() => undefined);
  const share = samples?.sum("vllm:kv_cache_usage_perc");
  const total = Number(samples?.labels("vllm:cache_config_info")?.num_gpu_blocks);
  if (share === undefined || !Number.isFinite(total)) return undefined;
  // vLLM does not count the null block, which is always in use.
  const used = Math.round(share * (total - 1));
  return { used, total, expired: samples?.sum("vllm:nixl_num_kv_expired_reqs_total") ?? 0 };
}

export function unfinishedRequests(samples: MetricSamples): number {
  const count = (state: string) => samples.sum(`vllm:num_requests_${state}`) ?? 0;
  return count("running") + count("waiting");
}

interface LeakCheckOptions {
  readonly server: EngineServer;
  readonly clock: Clock;
  readonly before: UsedBlocks | undefined;
  readonly unnotifiedBlocks: number;
  readonly leaseMs: number;
  readonly freeWithinMs: number;
  /** For the server's own timers. Default: 10000. */
  readonly leaseMarginMs?: number | undefined;
}

/**
 * Waits until P has freed notified requests' blocks, then for the other leases. Undefined without
 * the server's metrics.
 */
export async function checkLeaks(options: LeakCheckOptions): Promise<LeakReport | undefined> {
  const { server, clock, unnotifiedBlocks, leaseMs, freeWithinMs } = options;
  const { leaseMarginMs = LEASE_MARGIN_MS } = options;
  if (options.before === undefined) return undefined;
  const { used: before, expired } = options.before;
  const startedMs = clock.now();
  let latest: UsedBlocks | undefined;

  async function waitUntilFreed(blocks: number, timeoutMs: number): Promise<number | undefined> {
    for (;;) {
      // vLLM processes notifications and leases only in engine steps.
      await server.nudge().catch(() => {});
      latest = await readUsedBlocks(server);
      if (latest !== undefined && latest.used <= blocks) return clock.now() - startedMs;
      if (clock.now() - startedMs > timeoutMs) return undefined;
      await sleep(clock, POLL_MS);
    }
  }

  const freedMs = await waitUntilFreed(before + unnotifiedBlocks, freeWithinMs);
  if (latest === undefined) return undefined;
  const afterTold = latest.used;
  const isAllFreed = unnotifiedBlocks === 0 && freedMs !== undefined;
  const allFreedMs = isAllFreed
    ? freedMs
    : await waitUntilFreed(before, leaseMs + freeWithinMs + leaseMarginMs);
  if (latest === undefined) return undefined;
  const atEnd = latest.used;
  const beyond = (blocks: number, timeMs: number | undefined) =>
    timeMs === undefined ? Math.max(0, blocks - before) : 0;
  return {
    before,
    afterTold,
    atEnd,
    heldAlthoughTold: beyond(afterTold - unnotifiedBlocks, freedMs),
    leaked: beyond(atEnd, allFreedMs),
    freedMs,
    allFreedMs,
    expiredRequests: latest.expired - expired,
  };
}

export function sleep(clock: Clock, ms: number): Promise<void> {
  return new Promise((resolve) => void clock.setTimer(resolve, ms, { ref: true }));
}
