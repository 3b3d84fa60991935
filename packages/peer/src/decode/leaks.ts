import type { Clock } from "@kv/interface";
import type { EngineServer } from "../server/server.js";

/** The server's blocks, by its own `/metrics`. */
export interface UsedBlocks {
  readonly used: number;
  readonly total: number;
  /** `vllm:nixl_num_kv_expired_reqs_total`. */
  readonly expired: number;
}

export interface LeakReport {
  readonly before: number;
  /** When everything that the server was told of had to be free. */
  readonly afterTold: number;
  /** When the leases of all others had to be over. */
  readonly atEnd: number;
  /** Blocks in use beyond those before and those that nobody told of. */
  readonly heldAlthoughTold: number;
  /** Blocks in use at the end beyond those before. */
  readonly leaked: number;
  /** Until everything that it was told of was free, and until all was. */
  readonly freedMs: number | undefined;
  readonly allFreedMs: number | undefined;
  readonly expiredRequests: number;
}

const POLL_MS = 250;
const LEASE_MARGIN_MS = 10_000;

/** Used blocks as `vllm:kv_cache_usage_perc` tells them; undefined without that metric. */
export async function usedBlocks(server: EngineServer): Promise<UsedBlocks | undefined> {
  const samples = await server.metrics().catch(() => undefined);
  const share = samples?.sum("vllm:kv_cache_usage_perc");
  const total = Number(samples?.labels("vllm:cache_config_info")?.num_gpu_blocks);
  if (share === undefined || !Number.isFinite(total)) return undefined;
  // The null block is in use always, and not counted.
  const used = Math.round(share * (total - 1));
  return { used, total, expired: samples?.sum("vllm:nixl_num_kv_expired_reqs_total") ?? 0 };
}

export interface LeaksOptions {
  readonly server: EngineServer;
  readonly clock: Clock;
  readonly before: UsedBlocks | undefined;
  readonly unnotifiedBlocks: number;
  readonly leaseMs: number;
  readonly freeWithinMs: number;
  /** Beyond a lease, for the server's own clockwork; 10 s by default. */
  readonly leaseMarginMs?: number;
}

/**
 * Waits for the server to free what it was told of, then for the leases of the rest, and says what is left; undefined where its metrics
 * do not tell, before or now: what was in use before says nothing of a server that no longer answers.
 */
export async function leaksAfter(options: LeaksOptions): Promise<LeakReport | undefined> {
  const { server, clock, before, unnotifiedBlocks } = options;
  if (before === undefined) return undefined;
  const beganMs = clock.now();
  let latest: UsedBlocks | undefined;

  /** How long it took until no more than so many were in use; undefined when it did not happen in time. */
  async function fallenTo(blocks: number, withinMs: number): Promise<number | undefined> {
    for (;;) {
      // vLLM looks at notifications and leases in engine steps only: it is given one.
      await server.nudge().catch(() => {});
      latest = await usedBlocks(server);
      if (latest !== undefined && latest.used <= blocks) return clock.now() - beganMs;
      if (clock.now() - beganMs > withinMs) return undefined;
      await new Promise<void>((resolve) => clock.setTimer(resolve, POLL_MS, { ref: true }));
    }
  }

  const freedMs = await fallenTo(before.used + unnotifiedBlocks, options.freeWithinMs);
  if (latest === undefined) return undefined;
  const afterTold = latest.used;
  const waits = unnotifiedBlocks > 0 || freedMs === undefined;
  const allFreedMs = waits
    ? await fallenTo(
        before.used,
        options.leaseMs + options.freeWithinMs + (options.leaseMarginMs ?? LEASE_MARGIN_MS),
      )
    : freedMs;
  if (latest === undefined) return undefined;
  const atEnd = latest.used;
  return {
    before: before.used,
    afterTold,
    atEnd,
    heldAlthoughTold: freedMs === undefined ? Math.max(0, afterTold - before.used - unnotifiedBlocks) : 0,
    leaked: allFreedMs === undefined ? Math.max(0, atEnd - before.used) : 0,
    freedMs,
    allFreedMs,
    expiredRequests: latest.expired - before.expired,
  };
}
