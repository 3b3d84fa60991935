import { readdirSync, readFileSync } from "node:fs";
import {
  type Cluster,
  type ClusterMember,
  startCluster,
} from "../../../../apps/demo/src/cluster/cluster.js";
import { jsonLog } from "../../../../apps/demo/src/processes/json-log.js";
import { complete } from "../../../../apps/demo/src/run/completion-client.js";
import { median } from "../../report.js";
import { clusterOf, type ThreadTimes, timesOf, type Way } from "../ways.js";
import {
  cachedTokens,
  FORWARD_MS_PER_512,
  KEEP_FREED_MEMORY,
  type Point,
  promptMaker,
  SIMULATED,
} from "../workload.js";

/** One run of a point. */
export interface PointRun {
  /** Median time to the first token without the failed requests. */
  readonly ttftMs: number;
  /** Processor time per request. */
  readonly processorMs: ThreadTimes;
}

/** A deployment of the demo over NIXL: the proxy, P and D, each in its own process. */
export interface Deployment {
  /** Sends a point's requests through the proxy at once. */
  run(point: Point): Promise<PointRun>;
  /** How many requests failed. On a busy machine a request can miss its deadline. */
  readonly failed: number;
  /**
   * The time to the first token of one request that D serves alone, with the prompt in its prefix
   * cache.
   */
  localTtftMs(inputTokens: number): Promise<number>;
  close(): Promise<void>;
}

const CACHE_TOKENS = 24_576;
const WARM_PROMPTS = 16;
/** Short prompts of the warm-up, and how many of them are sent at once. */
const [WARM_SHORT_PROMPTS, WARM_AT_ONCE] = [128, 16];

export async function openDeployment(way: Way, pool: Point["pool"]): Promise<Deployment> {
  const log = jsonLog("error");
  // The processes of the deployment inherit it.
  Object.assign(process.env, KEEP_FREED_MEMORY);
  const cluster: Cluster = await startCluster(
    {
      ...clusterOf(way, pool, { ...SIMULATED, forwardMsPer512Tokens: FORWARD_MS_PER_512 }),
      transport: "nixl",
      cacheTokens: CACHE_TOKENS,
      // P must compute every prompt: it has no prefix cache.
      prefillInstance: { prefixCaching: false },
    },
    { log, logLevel: "error" },
  );
  let made = 0;
  let failed = 0;
  const makePrompt = promptMaker();
  const send = (promptTokens: readonly number[], maxTokens: number, url = cluster.proxy.url) => {
    made += 1;
    return complete({ url, requestId: `bench-${way.length}-${made}`, promptTokens, maxTokens });
  };

  async function run(point: Point): Promise<PointRun> {
    const { outputTokens, atOnce } = point;
    const prompts = Array.from({ length: atOnce }, () => makePrompt(point));
    const hit = cachedTokens(point);
    if (hit > 0) for (const prompt of prompts) await send(prompt.slice(0, hit + 1), 1);
    const before = processorMs(cluster);
    const outcomes = await Promise.allSettled(prompts.map((prompt) => send(prompt, outputTokens)));
    const after = processorMs(cluster);
    const times = outcomes.flatMap((one) => (one.status === "fulfilled" ? [one.value.ttftMs] : []));
    failed += atOnce - times.length;
    const spent = (threads: keyof ThreadTimes) =>
      timesOf((name) => (after[threads][name] - before[threads][name]) / atOnce);
    return { ttftMs: median(times), processorMs: { main: spent("main"), beside: spent("beside") } };
  }

  // Warms up: the proxy learns P's address from its first answer, D and P shake hands, code is
  // compiled, and each page of the pools is written.
  for (let i = 0; i < WARM_PROMPTS; i++)
    await send(makePrompt({ inputTokens: CACHE_TOKENS / 12 }), 2);
  for (let sent = 0; sent < WARM_SHORT_PROMPTS; sent += WARM_AT_ONCE) {
    const prompts = Array.from({ length: WARM_AT_ONCE }, () => makePrompt({ inputTokens: 128 }));
    await Promise.all(prompts.map((prompt) => send(prompt, 16)));
  }
  return {
    run,
    get failed() {
      return failed;
    },
    async localTtftMs(inputTokens) {
      const prompt = makePrompt({ inputTokens });
      const decode = cluster.decodes[0]?.url ?? "";
      await send(prompt, 1, decode);
      return (await send(prompt, 1, decode)).ttftMs;
    },
    close: () => cluster.close(),
  };
}

/** Processor time that each process has had so far. */
function processorMs({ proxy, prefills, decodes }: Cluster): ThreadTimes {
  const pids = (members: readonly ClusterMember[]) =>
    members.map(({ process: child }) => child?.pid ?? 0);
  const of = {
    client: [process.pid],
    proxy: pids([proxy]),
    prefill: pids(prefills),
    decode: pids(decodes),
  };
  const sum = (threads: keyof ThreadTimes) =>
    timesOf((name) => of[name].reduce((total, pid) => total + threadsMs(pid, threads), 0));
  return { main: sum("main"), beside: sum("beside") };
}

/**
 * By the scheduler's own count, in nanoseconds; the times in `stat` are multiples of 10 ms. A
 * process's first thread has its number.
 */
function threadsMs(pid: number, threads: keyof ThreadTimes): number {
  const folder = `/proc/${pid}/task`;
  const wanted = readdirSync(folder).filter(
    (thread) => (thread === String(pid)) === (threads === "main"),
  );
  return wanted.reduce((sum, thread) => {
    try {
      return (
        sum + Number(readFileSync(`${folder}/${thread}/schedstat`, "utf8").split(" ")[0]) / 1e6
      );
    } catch {
      // The thread has ended.
      return sum;
    }
  }, 0);
}
