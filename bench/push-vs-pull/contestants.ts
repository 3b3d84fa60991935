import { type Cluster, startCluster } from "../../apps/demo/src/cluster/cluster.js";
import { jsonLog } from "../../apps/demo/src/processes/json-log.js";
import { complete } from "../../apps/demo/src/run/completion-client.js";
import { median } from "../report.js";
import type { Point } from "./grid.js";
import { BLOCK_TOKENS, FORWARD_MS_PER_512, SIMULATED } from "./model.js";

export const WAYS = ["pull", "push", "push, layer-wise"] as const;
export type Way = (typeof WAYS)[number];

/** A deployment of the demo: proxy, P and D, each a process, over NIXL. */
export interface Contestant {
  /** Median of the times to the first token, through the proxy, of requests that are sent at once; those that failed are left out. */
  ttftMs(point: Point): Promise<number>;
  /** Requests that failed: a machine that others use too can be too slow for a deadline. */
  readonly failed: number;
  /** The same of one request that D computes all by itself, its prompt in D's prefix cache. */
  localTtftMs(inputTokens: number): Promise<number>;
  close(): Promise<void>;
}

const CACHE_TOKENS = 24_576;
const WARM_PROMPTS = 16;
const VOCABULARY = 1000;

export async function openContestant(way: Way, pool: Point["pool"]): Promise<Contestant> {
  const log = jsonLog("error");
  const cluster: Cluster = await startCluster(
    {
      transport: "nixl",
      connector: way === "pull" ? "NixlConnector" : "push",
      pushLayerwise: way === "push, layer-wise",
      prefills: 1,
      decodes: 1,
      prefillTp: 1,
      decodeTp: 1,
      prefillBlockSize: BLOCK_TOKENS,
      decodeBlockSize: BLOCK_TOKENS,
      cacheTokens: CACHE_TOKENS,
      instance: {
        simulate: { ...SIMULATED, forwardMsPer512Tokens: FORWARD_MS_PER_512 },
        fragmented: pool === "fragmented",
        digests: false,
      },
      // What D has, P would have too: its pass is to take its time.
      prefillInstance: { prefixCaching: false },
    },
    { log, logLevel: "error" },
  );
  let made = 0;
  let failed = 0;
  /** No two begin alike, so that no prefix cache has any of it. */
  const freshPrompt = (length: number): number[] => {
    made += 1;
    return Array.from({ length }, (_, i) => 3 + ((made * 7919 + i * 31 + ((made * i) % 13)) % VOCABULARY));
  };
  const send = (promptTokens: readonly number[], maxTokens: number, url = cluster.proxy.url) => {
    made += 1;
    return complete({ url, requestId: `bench-${way.length}-${made}`, promptTokens, maxTokens });
  };

  async function ttftMs({ inputTokens, outputTokens, atOnce, hitPercent }: Point): Promise<number> {
    // One more than whole blocks: a prefix cache holds whole blocks, and the last token is computed in any case.
    const prompts = Array.from({ length: atOnce }, () => freshPrompt(inputTokens + 1));
    const hit = Math.floor((inputTokens * hitPercent) / 100 / BLOCK_TOKENS) * BLOCK_TOKENS;
    if (hit > 0) for (const prompt of prompts) await send(prompt.slice(0, hit + 1), 1);
    const outcomes = await Promise.allSettled(prompts.map((prompt) => send(prompt, outputTokens)));
    const came = outcomes.flatMap((one) => (one.status === "fulfilled" ? [one.value.ttftMs] : []));
    failed += atOnce - came.length;
    return median(came);
  }

  // The proxy learns where P is from its first answer, the two shake hands, code gets warm, and each page of the pools has been written once.
  for (let i = 0; i < WARM_PROMPTS; i++) await send(freshPrompt(CACHE_TOKENS / 12), 2);
  return {
    ttftMs,
    get failed() {
      return failed;
    },
    async localTtftMs(inputTokens) {
      const prompt = freshPrompt(inputTokens + 1);
      const decode = cluster.decodes[0]?.url ?? "";
      await send(prompt, 1, decode);
      return (await send(prompt, 1, decode)).ttftMs;
    },
    close: () => cluster.close(),
  };
}
