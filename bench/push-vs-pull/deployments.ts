import { type Cluster, startCluster } from "../../apps/demo/src/cluster/cluster.js";
import { jsonLog } from "../../apps/demo/src/processes/json-log.js";
import { complete } from "../../apps/demo/src/run/completion-client.js";
import { median } from "../report.js";
import { BLOCK_TOKENS, FORWARD_MS_PER_512, type Point, SIMULATED } from "./workload.js";

export const WAYS = ["pull", "push", "push, layer-wise"] as const;
export type Way = (typeof WAYS)[number];

/** A deployment of the demo over NIXL: the proxy, P and D, each in its own process. */
export interface Deployment {
  /** Sends a point's requests through the proxy at once. Returns the median time to the first token without the failed ones. */
  ttftMs(point: Point): Promise<number>;
  /** How many requests failed. On a busy machine a request can miss its deadline. */
  readonly failed: number;
  /** The time to the first token of one request that D serves alone, with the prompt in its prefix cache. */
  localTtftMs(inputTokens: number): Promise<number>;
  close(): Promise<void>;
}

const CACHE_TOKENS = 24_576;
const WARM_PROMPTS = 16;
const VOCABULARY = 1000;

export async function openDeployment(way: Way, pool: Point["pool"]): Promise<Deployment> {
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
      // P must compute every prompt: it has no prefix cache.
      prefillInstance: { prefixCaching: false },
    },
    { log, logLevel: "error" },
  );
  let made = 0;
  let failed = 0;
  /** No two prompts share a prefix, so that no prefix cache has any of it. */
  const freshPrompt = (length: number): number[] => {
    made += 1;
    return Array.from({ length }, (_, i) => 3 + ((made * 7919 + i * 31 + ((made * i) % 13)) % VOCABULARY));
  };
  const send = (promptTokens: readonly number[], maxTokens: number, url = cluster.proxy.url) => {
    made += 1;
    return complete({ url, requestId: `bench-${way.length}-${made}`, promptTokens, maxTokens });
  };

  async function ttftMs({ inputTokens, outputTokens, atOnce, hitPercent }: Point): Promise<number> {
    // One token more than whole blocks: a prefix cache holds whole blocks, and the last token is always computed.
    const prompts = Array.from({ length: atOnce }, () => freshPrompt(inputTokens + 1));
    const hit = Math.floor((inputTokens * hitPercent) / 100 / BLOCK_TOKENS) * BLOCK_TOKENS;
    if (hit > 0) for (const prompt of prompts) await send(prompt.slice(0, hit + 1), 1);
    const outcomes = await Promise.allSettled(prompts.map((prompt) => send(prompt, outputTokens)));
    const times = outcomes.flatMap((one) => (one.status === "fulfilled" ? [one.value.ttftMs] : []));
    failed += atOnce - times.length;
    return median(times);
  }

  // Warms up: the proxy learns P's address from its first answer, D and P shake hands, code is compiled, and each page of the pools is written.
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

/** How many times longer pull takes: the ratio of the medians. */
export function gainOf(ttftMs: Readonly<Record<Way, readonly number[]>>, way: Way): number {
  return median(ttftMs.pull) / median(ttftMs[way]);
}
