import { readFileSync } from "node:fs";
import { loadavg } from "node:os";
import { fileURLToPath } from "node:url";
import { containerNode } from "../release/registry.js";
import { cpuMs, freePort, residentBytes } from "./child-processes.js";
import { routerCommand } from "./python-peer.js";
import { alone, compare, inTurn, median, percentile, type Row, spread } from "./report.js";
import {
  type Bench,
  besideRouter,
  type LoadResult,
  OTHER_CORE,
  ROUTER_CORE,
  type Target,
} from "./router-load.js";
import type { Run } from "./run.js";

const ROUNDS = 5;
const WINDOW_MS = 4_000;
/**
 * At a fixed rate the two routers take turns in short rounds; there are so many that a single stall
 * of the machine does not decide the p99.
 */
const PACED_ROUNDS = 60;
const PACED_WINDOW_MS = 1_000;
const PACED_CONNECTIONS = 128;
/**
 * A paced round in which the load generator itself was later than this is measured again: something
 * else took its core.
 */
const MOST_LATE_MS = 5;
const CONCURRENCY = 32;
const STREAMS = 10_000;
/** Files that the router needs besides the two sockets of each open stream. */
const SPARE_FILES = 500;
const CLI = fileURLToPath(new URL("../../packages/proxy/dist/cli.js", import.meta.url));

type Both<T> = [T[], T[]];
const both = <T>(): Both<T> => [[], []];

/**
 * Compares kv-proxy with vllm-router. Both run on the same core and get load in turn; load
 * generator and upstreams share the other core.
 */
export const proxy = (run: Run): Promise<readonly Row[]> =>
  besideRouter(OTHER_CORE, async (bench) => {
    // All streams come from one address.
    const limits = ["--max-connections-per-address", "--max-requests-per-client"];
    // As in its container: see the README of @kv/proxy, "Measured".
    const ours = await bench.startOurs(ROUTER_CORE, await containerNode(), [
      "--no-memory-reducer",
      CLI,
      ...bench.flags,
      ...limits.flatMap((flag) => [flag, String(STREAMS)]),
    ]);

    const port = await freePort();
    const options = {
      "--prefill": `http://${bench.prefill}`,
      "--decode": `http://${bench.decode}`,
      "--policy": "round_robin",
      "--port": port,
      "--prometheus-port": await freePort(),
      "--log-level": "error",
      "--worker-startup-check-interval": 1,
      "--kv-connector": "nixl",
    };
    const args = ["--vllm-pd-disaggregation", ...Object.entries(options).flat().map(String)];
    const router = bench.start(ROUTER_CORE, await routerCommand(), args);
    router.stdout.resume();
    const theirs = { url: `http://127.0.0.1:${port}`, pid: router.pid ?? 0 };
    await bench.generator.answered(theirs.url);

    return [
      ...(await sideBySide(bench, [ours, theirs], run)),
      await manyStreams(ours, bench, run.short ? STREAMS / 10 : STREAMS),
    ];
  });

async function sideBySide(
  { generator, prefill, decode }: Bench,
  targets: readonly [Target, Target],
  run: Run,
): Promise<Row[]> {
  const busy = (url: string) => generator.load(url, CONCURRENCY, WINDOW_MS);
  const p50 = async (url: string, ms: number) => median((await generator.load(url, 1, ms)).tookMs);
  for (const { url } of targets) await busy(url);
  const [rates, cpu, added] = [both<number>(), both<number>(), both<number>()];
  const busyMs = both<readonly number[]>();
  for (let round = 0; round < run.rounds(ROUNDS); round += 1) {
    for (const at of inTurn(round)) {
      const { url, pid } = targets[at];
      const before = cpuMs(pid);
      const { perSecond, tookMs } = await busy(url);
      rates[at].push(perSecond);
      busyMs[at].push(tookMs);
      cpu[at].push((cpuMs(pid) - before) / tookMs.length);
    }
    const legs = [prefill, decode].map((address) => `http://${address}`);
    let direct = 0;
    for (const url of legs) direct += await p50(url, WINDOW_MS / 8);
    for (const at of [0, 1] as const)
      added[at].push((await p50(targets[at].url, WINDOW_MS / 4)) - direct);
  }

  // The same rate for both: half of the slower router's throughput.
  const perSecond = Math.max(1, Math.floor(Math.min(median(rates[0]), median(rates[1])) / 2));
  const paced = (url: string) => generator.load(url, PACED_CONNECTIONS, PACED_WINDOW_MS, perSecond);
  // Opens the connections.
  for (const { url } of targets) await paced(url);
  const pacedMs = both<readonly number[]>();
  const wanted = run.rounds(PACED_ROUNDS);
  let measured = 0;
  for (; measured < 3 * wanted && pacedMs[0].length < wanted; measured += 1) {
    const results: LoadResult[] = [];
    for (const at of inTurn(measured)) results[at] = await paced(targets[at].url);
    if (results.some(({ lateMs }) => lateMs > MOST_LATE_MS)) continue;
    for (const at of [0, 1] as const) pacedMs[at].push(results[at]?.tookMs ?? []);
  }
  const again = measured - pacedMs[0].length;

  const ceiling = await generator.load(`http://${decode}`, CONCURRENCY, WINDOW_MS / 2);
  const loads = loadavg()
    .map((each) => each.toFixed(1))
    .join(" ");
  const what = `${CONCURRENCY} clients, streamed, one core for the router`;
  return [
    compare(`requests per second, ${what}: ours / vllm-router's`, rates, "/s", ">=", 1),
    tail(
      `at ${perSecond} requests per second, half of the slower one's, ${pacedMs[0].length} rounds of ${PACED_WINDOW_MS} ms (${again} more not counted: the load generator was late)`,
      pacedMs,
      5,
    ),
    tail(`${what}, all clients busy`, busyMs, 2),
    alone(
      `load generator and one upstream alone, ${CONCURRENCY} clients: what no router could exceed on these cores; load average ${loads}`,
      `${ceiling.perSecond.toFixed(0)} /s`,
    ),
    compare("processor time of the router per request: ours / theirs", cpu, "ms", "<="),
    alone(
      "added latency, one client, p50 (both legs directly is subtracted)",
      spread(added[0], "ms"),
      "<= 1 ms",
      median(added[0]) <= 1,
      spread(added[1], "ms"),
      added[0].length,
    ),
  ];
}

/**
 * The p99 of all rounds' requests, which a few slow rounds can decide. The median of the rounds'
 * p99 beside it tells whether most rounds are slow; a router's own rare pauses are not in it.
 */
function tail(what: string, rounds: Both<readonly number[]>, mostLaterMs: number): Row {
  const [ours, theirs] = [percentile(rounds[0].flat(), 0.99), percentile(rounds[1].flat(), 0.99)];
  const show = (all: readonly (readonly number[])[]) =>
    `${[0.5, 0.99, 1].map((share) => percentile(all.flat(), share).toFixed(1)).join(" / ")} ms (${median(all.map((tookMs) => percentile(tookMs, 0.99))).toFixed(1)})`;
  return {
    what: `p50 / p99 / max of all rounds' requests (median of the rounds' p99), ${what} (p99 later by ${(ours - theirs).toFixed(2)} ms)`,
    ours: show(rounds[0]),
    theirs: show(rounds[1]),
    ratio: ours / theirs,
    wanted: `p99 within ${mostLaterMs} ms`,
    met: ours - theirs <= mostLaterMs,
    rounds: rounds[0].length,
  };
}

/** The router's memory while streams are open, each on a connection of its own. */
async function manyStreams(
  { url, pid }: Target,
  { upstream }: Bench,
  wanted: number,
): Promise<Row> {
  const limits = readFileSync(`/proc/${pid}/limits`, "utf8");
  const files = Number(/Max open files\s+(\d+)/.exec(limits)?.[1] ?? Number.POSITIVE_INFINITY);
  const count = Math.min(wanted, Math.floor((files - SPARE_FILES) / 2));
  const body = JSON.stringify({ model: "m", prompt: "hold", max_tokens: 1000, stream: true });
  const headers = { "content-type": "application/json" };
  /** Resolves at the first event, with what reads the others. */
  const open = async () => {
    const response = await fetch(`${url}/v1/completions`, { method: "POST", headers, body });
    const reader = (response.body as ReadableStream<Uint8Array>).getReader();
    await reader.read();
    return async () => {
      let text = "";
      for (let part = await reader.read(); !part.done; part = await reader.read())
        text += Buffer.from(part.value).toString();
      return text.includes("data: [DONE]");
    };
  };
  const streams: (() => Promise<boolean>)[] = [];
  while (streams.length < count) {
    const more = Math.min(200, count - streams.length);
    streams.push(...(await Promise.all(Array.from({ length: more }, open))));
  }
  const resident = residentBytes(pid);
  upstream.stdin?.write("release\n");
  const ended = await Promise.all(streams.map((rest) => rest().catch(() => false)));
  const complete = ended.filter(Boolean).length;

  const gibibytes = resident / 2 ** 30;
  const allGibibytes = (gibibytes * wanted) / count;
  const limited =
    count < wanted
      ? `, of ${files} files (${wanted} at as much each: ${allGibibytes.toFixed(3)} GiB)`
      : "";
  const what = `${count} open streams${limited}: resident memory (${complete} of them then ended complete)`;
  const isMet = allGibibytes <= 1 && complete === count;
  return alone(what, `${gibibytes.toFixed(3)} GiB`, "<= 1 GiB", isMet);
}

const ALL_CORES = "0,1";
const WORKER_CLIENTS = 64;
const WORKER_WINDOW_MS = 3_000;
/** Each worker compiles its code for itself. */
const WARM_MS_PER_WORKER = 6_000;

/**
 * One worker and two on the same two cores, with the load generator and the servers on them too:
 * what these take of the cores is not there for the proxy.
 */
export const proxyWorkers = (run: Run): Promise<readonly Row[]> =>
  besideRouter(ALL_CORES, async ({ generator, upstream, flags, startOurs }) => {
    const load = async (url: string, ms: number) =>
      (await generator.load(url, WORKER_CLIENTS, ms)).tookMs.length;
    const targets: Target[] = [];
    for (const workers of [2, 1]) {
      const args = [CLI, ...flags, "--pairing", "off", "--workers", String(workers)];
      const target = await startOurs(ALL_CORES, process.execPath, args);
      await load(target.url, workers * WARM_MS_PER_WORKER);
      targets.push(target);
    }
    const helpersMs = () => cpuMs(upstream.pid ?? 0) + cpuMs(generator.pid);
    const [rates, cpu, share] = [both<number>(), both<number>(), both<number>()];
    for (let round = 0; round < run.rounds(ROUNDS); round += 1)
      for (const at of inTurn(round)) {
        const { url, pid } = targets[at] as Target;
        const [beforeMs, helpersBeforeMs] = [cpuMs(pid), helpersMs()];
        const count = await load(url, WORKER_WINDOW_MS);
        rates[at].push((count * 1000) / WORKER_WINDOW_MS);
        cpu[at].push((cpuMs(pid) - beforeMs) / count);
        share[at].push((helpersMs() - helpersBeforeMs) / count);
      }
    const what = `requests per second, ${WORKER_CLIENTS} clients, on the same two cores: 2 workers / 1 worker`;
    const time = "processor time of all processes of the proxy per request: 2 workers / 1 worker";
    const beside = "processor time of load generator and servers per request: the same";
    return [
      compare(what, rates, "/s", ">=", 1.5),
      compare(time, cpu, "ms", "<="),
      compare(beside, share, "ms", "<="),
    ];
  });
