import type { Clock } from "@kv/interface";
import { z } from "zod";
import type { EngineServer } from "../http/engine-server.js";
import type { MetricSamples } from "../http/prometheus-text.js";

export interface UsedBlocks {
  readonly used: number;
  /** All blocks, the null block included. */
  readonly total: number;
  /** `vllm:nixl_num_kv_expired_reqs_total`. */
  readonly expired: number;
}

/** What a server still holds after a load. All blocks are logical blocks. */
export type LeakReport = z.infer<typeof leakSchema>;

/** The schema of a `LeakReport`. */
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

/**
 * Reads the used blocks from `vllm:kv_cache_usage_perc`; undefined when the server does not publish
 * it.
 */
export async function readUsedBlocks(server: EngineServer): Promise<UsedBlocks | undefined> {
  const samples = await server.metrics().catch(() => undefined);
  const share = samples?.sum("vllm:kv_cache_usage_perc");
  const total = Number(samples?.labels("vllm:cache_config_info")?.num_gpu_blocks);
  if (share === undefined || !Number.isFinite(total)) return undefined;
  // vLLM does not count the null block, which is always in use.
  const used = Math.round(share * (total - 1));
  return { used, total, expired: samples?.sum("vllm:nixl_num_kv_expired_reqs_total") ?? 0 };
}

/** Requests that run or wait: the blocks in use may be theirs. */
export function unfinishedRequests(samples: MetricSamples): number {
  return (
    (samples.sum("vllm:num_requests_running") ?? 0) +
    (samples.sum("vllm:num_requests_waiting") ?? 0)
  );
}

export interface LeakCheckOptions {
  readonly server: EngineServer;
  readonly clock: Clock;
  /** The used blocks before the load; undefined when the server does not publish them. */
  readonly before: UsedBlocks | undefined;
  readonly unnotifiedBlocks: number;
  readonly leaseMs: number;
  readonly freeWithinMs: number;
  /** Added to the lease for the server's own timers. Default: 10000. */
  readonly leaseMarginMs?: number | undefined;
}

/**
 * Waits until P has freed what it was notified of, then until the leases of the other requests have
 * ended, and reports what is left. Undefined when the server's metrics are missing, before or
 * after: nothing is known about leaks then.
 */
export async function checkLeaks(options: LeakCheckOptions): Promise<LeakReport | undefined> {
  const { server, clock, before, unnotifiedBlocks, leaseMs, freeWithinMs } = options;
  if (before === undefined) return undefined;
  const startedMs = clock.now();
  let latest: UsedBlocks | undefined;

  async function waitUntilFreed(blocks: number, timeoutMs: number): Promise<number | undefined> {
    for (;;) {
      // vLLM processes notifications and leases only in engine steps; a request causes one.
      await server.nudge().catch(() => {});
      latest = await readUsedBlocks(server);
      if (latest !== undefined && latest.used <= blocks) return clock.now() - startedMs;
      if (clock.now() - startedMs > timeoutMs) return undefined;
      await new Promise<void>((resolve) => clock.setTimer(resolve, POLL_MS, { ref: true }));
    }
  }

  const freedMs = await waitUntilFreed(before.used + unnotifiedBlocks, freeWithinMs);
  if (latest === undefined) return undefined;
  const afterTold = latest.used;
  const leasesEndMs = leaseMs + freeWithinMs + (options.leaseMarginMs ?? LEASE_MARGIN_MS);
  const isAllFreed = unnotifiedBlocks === 0 && freedMs !== undefined;
  const allFreedMs = isAllFreed ? freedMs : await waitUntilFreed(before.used, leasesEndMs);
  if (latest === undefined) return undefined;
  const atEnd = latest.used;
  return {
    before: before.used,
    afterTold,
    atEnd,
    heldAlthoughTold:
      freedMs === undefined ? Math.max(0, afterTold - before.used - unnotifiedBlocks) : 0,
    leaked: allFreedMs === undefined ? Math.max(0, atEnd - before.used) : 0,
    freedMs,
    allFreedMs,
    expiredRequests: latest.expired - before.expired,
  };
}
