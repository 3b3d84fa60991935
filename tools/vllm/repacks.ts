import { decode, prefill } from "./completion.js";
import { freshId } from "./held-blocks.js";
import { openOurPrefill } from "./our-prefill.js";
import { handshakeTimedOut, retryAfterTimeout } from "./retry-after-timeout.js";
import type { VllmServer } from "./server.js";
import { prompt } from "./tiny-peer.js";
import { until } from "./until.js";

/** What a worker logs in the handshake after which it repacks. */
const REPACKS = "hint heterogeneous attn post process";
const WITHIN_MS = 120_000;

/**
 * Waits until each worker of a push D repacks KV from another attention backend, as ours is.
 *
 * A vLLM worker on the CPU learns that it must repack in a handshake that loads P's memory
 * descriptors. In push only a heartbeat starts such a handshake; the handshake before a
 * registration loads what a notification needs (`notif_agents_only` in `nixl/push_worker.py`, vLLM
 * 0.31 to 0.33). When the registration comes first, the worker takes our blocks as they are, and D
 * generates other tokens. A heartbeat is due a sixth of a lease after the last one, so each try
 * waits that long.
 */
export async function untilRepacks(server: VllmServer): Promise<void> {
  const { kind, leaseSeconds, tp, url } = server;
  if (kind.mode === "pull") return;
  const workers = () => {
    const lines = server.log().split("\n");
    return new Set(
      lines.filter((line) => line.includes(REPACKS)).map((line) => /^\([^)]*\)/.exec(line)?.[0]),
    );
  };
  const tried = async () => {
    if (workers().size >= tp) return true;
    await new Promise((resolve) => setTimeout(resolve, (leaseSeconds * 1000) / 6));
    const ours = await openOurPrefill({ kind, leaseSeconds });
    try {
      await retryAfterTimeout(async () => {
        const id = freshId();
        const tokens = prompt(40);
        await decode(url, tokens, 1, await prefill(ours.url, tokens, { id }), { id, salt: id });
      }, handshakeTimedOut(server));
    } finally {
      await ours.instance.close();
    }
    return workers().size >= tp;
  };
  await until(tried, `each worker of ${server.name} repacks`, { timeoutMs: WITHIN_MS });
}
