// What is measured of a router. Each event starts it anew, so that none has another's compiled
// code, connections or load.
import { setTimeout as sleep } from "node:timers/promises";
import { jsonLog } from "@kv/fleet/front-end";
import { startCluster } from "../../../apps/demo/src/cluster/cluster.js";
import { ONE_PAIR, SIMULATED } from "../deployments.js";
import { median, percentile } from "../report.js";
import { type Arena, bodyOf, type Load, OTHER_CORE, type Router } from "./arena.js";
import { CONTESTANTS } from "./contestants.js";
import { startEngines } from "./engines.js";
import {
  blocksOfInfiniteCache,
  OUR_TRACE,
  promptOf,
  readTrace,
  startCachingPrefill,
  type TracedRequest,
} from "./turns.js";

export interface Figure {
  readonly what: string;
  readonly value: number;
  readonly unit: string;
  readonly better: "<=" | ">=";
  /** Of the ratio to the reference, by the router that it is a goal of. */
  readonly goals?: Readonly<Record<string, number>>;
  /** How many ms more than the reference's it may be. */
  readonly laterMs?: number;
}

export interface Asked {
  readonly arena: Arena;
  readonly name: string;
  readonly short: boolean;
  /** Half of the reference's requests a second in this round: the same for all. */
  readonly halfRate: number | undefined;
  /** A trace in Mooncake's form. */
  readonly trace: string | undefined;
}

const CLIENTS = 32;
const LONG_CLIENTS = 64;
const PACED_CLIENTS = 128;
const AT_ONCE = "16 tokens at once";
const ONE_BY_ONE = "128 tokens, one every 5 ms";
/** A refusal that is counted as failed costs the load generator a connection. */
const FAILING_PER_SECOND = 200;

const least = (what: string, value: number, unit: string, more: Partial<Figure> = {}): Figure => ({
  what,
  value,
  unit,
  better: "<=",
  ...more,
});
const most = (what: string, value: number, unit: string, more: Partial<Figure> = {}): Figure => ({
  ...least(what, value, unit, more),
  better: ">=",
});

/** Runs `measure` against a fresh router before fresh engines. */
async function fresh<T>(
  { arena, name }: Asked,
  pairs: number,
  measure: (router: Router, engines: Awaited<ReturnType<typeof startEngines>>) => Promise<T>,
): Promise<T> {
  await using engines = await startEngines(OTHER_CORE, pairs);
  await using router = await arena.start(name, engines);
  return await measure(router, engines);
}

const ownEngines = ({ name }: Asked) => {
  if (CONTESTANTS[name]?.own === true) throw new Error("its engines are its own");
};

async function load(asked: Asked): Promise<readonly Figure[]> {
  const { arena, name, short, halfRate } = asked;
  const [warmMs, windowMs] = short ? [300, 300] : [10_000, 2_000];
  const cores = CONTESTANTS[name]?.cores ?? 1;
  return await fresh(asked, 1, async ({ url, cpuMs }, { prefills, decodes }) => {
    const succeeds = async (at: string, given: Load) => {
      const result = await arena.load(at, given);
      if (result.failed > 0) throw new Error(`${result.failed} requests failed`);
      return result;
    };
    const figures: Figure[] = [];
    await succeeds(url, { clients: CLIENTS, ms: warmMs });
    for (const [stream, more] of [
      [AT_ONCE, {}],
      [ONE_BY_ONE, { user: "long", max_tokens: 128 }],
    ] as const)
      for (const kilobytes of [1, 20, 220]) {
        const body = bodyOf(kilobytes * 1000 - 100, more);
        const clients = stream === AT_ONCE ? CLIENTS : LONG_CLIENTS;
        const before = cpuMs();
        const { perSecond, tookMs } = await succeeds(url, { clients, ms: windowMs, body });
        const cpu = (cpuMs() - before) / tookMs.length;
        const cell = `bodies of ${kilobytes} KB, streams of ${stream}`;
        const goal = kilobytes === 1 ? 1.1 : 1;
        const goals = { "kv-proxy": goal };
        figures.push(least(`processor time per request, ${cell}`, cpu, "ms", { goals }));
        if (kilobytes > 1 || stream !== AT_ONCE) continue;
        const rates = { "kv-proxy": 1, "kv-proxy-node-20": 0.9 };
        figures.push(
          most(`requests a second per core, ${CLIENTS} clients`, perSecond / cores, "/s", {
            goals: rates,
          }),
          least("p50 at full load", median(tookMs), "ms"),
          least("p99 at full load", percentile(tookMs, 0.99), "ms", { laterMs: 10 }),
        );
      }

    const alone = async (at: string) =>
      median((await arena.load(at, { clients: 1, ms: windowMs / 4 })).tookMs);
    const own = CONTESTANTS[name]?.own === true;
    let direct = 0;
    for (const leg of [prefills, decodes]) direct += own ? 0 : await alone(`http://${leg[0]}`);
    figures.push(least("added latency, one client, p50", (await alone(url)) - direct, "ms"));

    const perSecond = halfRate ?? Math.max(1, Math.floor((figures[1]?.value ?? 2) / 2));
    const paced: Load = { clients: PACED_CLIENTS, ms: windowMs * 3, perSecond };
    const { tookMs } = await arena.load(url, paced);
    const at = "at half of the reference's load";
    return [
      ...figures,
      least(`p50 ${at}`, median(tookMs), "ms"),
      least(`p99 ${at}`, percentile(tookMs, 0.99), "ms", { laterMs: 5 }),
    ];
  });
}

/** Windows of seconds, one after another, from the first answer on. */
const COLD_SECONDS = [1, 1, 3, 15];

async function cold(asked: Asked): Promise<readonly Figure[]> {
  const { arena, short } = asked;
  return await fresh(asked, 1, async ({ url, readyMs, cpuMs }) => {
    const all: number[] = [];
    const figures = [least("from its start until it is ready", readyMs, "ms")];
    let [seconds, early, warm] = [0, 0, 0];
    const before = cpuMs();
    for (const window of COLD_SECONDS) {
      const ms = short ? window * 50 : window * 1000;
      const { tookMs, perSecond } = await arena.load(url, { clients: CLIENTS, ms });
      all.push(...tookMs);
      seconds += window;
      warm = perSecond;
      if (seconds === 2) early = all.length / (short ? 0.1 : 2);
      if (seconds === 2)
        figures.push(
          least(
            "processor time per request in the first 2 s",
            (cpuMs() - before) / all.length,
            "ms",
          ),
        );
      if (seconds === 2) continue;
      figures.push(
        most(`requests in the first ${seconds} s`, all.length, ""),
        least(`p99 of the first ${seconds} s`, percentile(all, 0.99), "ms"),
      );
    }
    // Each against its own warm rate: the goal is an absolute one.
    const share = early / warm;
    return [...figures, most("rate of the first 2 s, of its warm rate", share, "")];
  });
}

async function memory(asked: Asked): Promise<readonly Figure[]> {
  ownEngines(asked);
  const count = asked.short ? 50 : 5_000;
  const body = bodyOf(900, { user: "hold", max_tokens: 1000 });
  const headers = { "content-type": "application/json" };
  return await fresh(asked, 1, async ({ url, residentBytes }, { release }) => {
    const open = async () => {
      const answer = await fetch(`${url}/v1/completions`, { method: "POST", headers, body });
      const parts = (answer.body as ReadableStream<Uint8Array>).values();
      await parts.next();
      return async () => {
        let text = "";
        for await (const part of parts) text += Buffer.from(part).toString();
        return text.includes("data: [DONE]");
      };
    };
    const streams: (() => Promise<boolean>)[] = [];
    while (streams.length < count)
      streams.push(...(await Promise.all(Array.from({ length: 50 }, open))));
    const mebibytes = residentBytes() / 2 ** 20;
    release();
    const ended = await Promise.all(streams.map((rest) => rest().catch(() => false)));
    return [
      least(`memory with ${count} open streams`, mebibytes, "MiB"),
      most(`of ${count} open streams, ended complete`, ended.filter(Boolean).length, ""),
    ];
  });
}

/** One of three P or D, a second after the load began. */
async function failures(asked: Asked): Promise<readonly Figure[]> {
  ownEngines(asked);
  const ms = asked.short ? 400 : 5_000;
  const figures: Figure[] = [];
  for (const role of ["P", "D"] as const)
    for (const how of ["at 503", "killed", "ended politely"] as const)
      figures.push(
        await fresh(asked, 3, async ({ url }, { endings }) => {
          const given = { clients: CLIENTS, ms, perSecond: FAILING_PER_SECOND };
          await asked.arena.load(url, { ...given, ms: ms / 4 });
          const running = asked.arena.load(url, given);
          await sleep(ms / 5);
          endings[how](role);
          const { failed } = await running;
          const what = `one of three ${role} ${how}: failed requests of ${(ms * FAILING_PER_SECOND) / 1000}`;
          return least(what, failed, "", { goals: { "kv-proxy": 1 } });
        }),
      );
  return figures;
}

/** Real time of the trace is this many times as long. */
const FASTER = 8;
/** Of each of three P; the trace of ours has 1,137. */
const CACHE_BLOCKS = 420;

async function turns(asked: Asked): Promise<readonly Figure[]> {
  ownEngines(asked);
  const trace = readTrace(asked.trace ?? OUR_TRACE, asked.short ? 40 : 5_000);
  await using engines = await startEngines(OTHER_CORE, 3);
  const prefills = await Promise.all(
    engines.decodes.map(() =>
      startCachingPrefill(CACHE_BLOCKS, engines.engineId, engines.sideChannel),
    ),
  );
  try {
    const given = { ...engines, prefills: prefills.map(({ at }) => at), followsPrefixes: true };
    await using router = await asked.arena.start(asked.name, given);
    const tookMs = await replay(router.url, trace, asked.short ? 100 : FASTER);
    const cached = prefills.reduce((sum, { cachedBlocks }) => sum + cachedBlocks(), 0);
    const share = cached / blocksOfInfiniteCache(trace);
    return [
      most("cached tokens of a trace of conversations, of an infinite cache's", share, "", {
        goals: { "kv-proxy": 1 },
      }),
      least("the trace's requests, p50", median(tookMs), "ms"),
    ];
  } finally {
    for (const prefill of prefills) prefill.close();
  }
}

async function replay(url: string, trace: readonly TracedRequest[], faster: number) {
  const startedMs = performance.now();
  const first = trace[0]?.timestamp ?? 0;
  return await Promise.all(
    trace.map(async (request) => {
      await sleep((request.timestamp - first) / faster);
      const sentMs = performance.now();
      const answer = await fetch(`${url}/v1/completions`, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify({
          model: "m",
          prompt: promptOf(request),
          max_tokens: 16,
          stream: true,
        }),
      });
      await answer.text();
      if (answer.status !== 200) throw new Error(`${answer.status} after ${sentMs - startedMs} ms`);
      return performance.now() - sentMs;
    }),
  );
}

/** Engines of ours: blocks of P without a reader are held for their lease of 30 s. */
async function aborts(asked: Asked): Promise<readonly Figure[]> {
  ownEngines(asked);
  const count = asked.short ? 40 : 10_000;
  const options = {
    ...ONE_PAIR,
    transport: "memory",
    cacheTokens: 65_536,
    instance: { simulate: { ...SIMULATED, forwardMsPer512Tokens: 4 }, digests: false },
  } as const;
  await using cluster = await startCluster(options, {
    log: jsonLog("silent", process.stderr),
    logLevel: "silent",
  });
  const addresses = (all: readonly { readonly url: string }[]) =>
    all.map(({ url }) => new URL(url).host);
  const prompt = Array.from({ length: 100 }, (_, at) => 3 + at);
  const body = JSON.stringify({ prompt, max_tokens: 8, stream: true });
  const engines = {
    request: body,
    prefills: addresses(cluster.prefills),
    decodes: addresses(cluster.decodes),
    [Symbol.asyncDispose]: async () => {},
  };
  await using router = await asked.arena.start(asked.name, engines);
  let sent = 0;
  const client = async () => {
    while (sent < count) {
      // Through all moments of a request, in turn.
      const signal = AbortSignal.timeout(sent++ % 40);
      const headers = { "content-type": "application/json" };
      await fetch(`${router.url}/v1/completions`, { method: "POST", headers, body, signal })
        .then((answer) => answer.text())
        .catch(() => {});
    }
  };
  await Promise.all(Array.from({ length: 16 }, client));
  await sleep(2_000);
  const status = await fetch(`${cluster.prefills[0]?.url}/status`);
  const { outstanding } = (await status.json()) as { outstanding: { readonly blocks: number } };
  const what = `blocks held at P 2 s after ${count} aborts`;
  return [least(what, outstanding.blocks, "", { goals: { "kv-proxy": 1 } })];
}

export const EVENTS = { load, cold, memory, failures, turns, aborts } as const;
