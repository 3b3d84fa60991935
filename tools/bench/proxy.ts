import type { ChildProcess } from "node:child_process";
import { readFileSync } from "node:fs";
import { loadavg } from "node:os";
import { fileURLToPath } from "node:url";
import { containerNode } from "../release/registry.js";
import { cpuMs, firstLine, freePort, residentBytes } from "./child-processes.js";
import { besideRouter, type LoadGenerator, type LoadResult, ROUTER_CORE } from "./proxy-load.js";
import { openStreams } from "./proxy-streams.js";
import { routerCommand } from "./python-peer.js";
import { alone, compare, inTurn, median, percentile, type Row, spread } from "./report.js";

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
const MOST_PACED_ROUNDS = 3 * PACED_ROUNDS;
const CONCURRENCY = 32;
const STREAMS = 10_000;
/** Files that the router needs besides the two sockets of each open stream. */
const SPARE_FILES = 500;

/**
 * Compares kv-proxy with vllm-router. Both run on the same core and get load in turn; load
 * generator and upstreams share the other core.
 */
export const proxy = (): Promise<readonly Row[]> =>
  besideRouter(async (bench) => {
    const { flags, generator, start, upstream } = bench;
    const cli = fileURLToPath(new URL("../../packages/proxy/dist/cli.js", import.meta.url));
    // All streams come from one address.
    const limits = ["--max-connections-per-address", "--max-requests-per-client"];
    const own = start(
      ROUTER_CORE,
      // As in its container: see the README of @kv/proxy, "Measured".
      await containerNode(),
      ["--no-memory-reducer", cli, ...flags, ...limits.flatMap((flag) => [flag, String(STREAMS)])],
      { ...process.env, NODE_ENV: "production" },
    );
    const ours = { url: /ready (\S+)/.exec(await firstLine(own))?.[1] ?? "", pid: own.pid ?? 0 };

    const [p, d] = [`http://${bench.prefill}`, `http://${bench.decode}`];
    const [port, metricsPort] = [await freePort(), await freePort()];
    const router = start(ROUTER_CORE, await routerCommand(), [
      "--vllm-pd-disaggregation",
      "--prefill",
      p,
      "--decode",
      d,
      "--policy",
      "round_robin",
      "--port",
      String(port),
      "--prometheus-port",
      String(metricsPort),
      "--log-level",
      "error",
      "--worker-startup-check-interval",
      "1",
      "--kv-connector",
      "nixl",
    ]);
    router.stdout?.resume();
    const theirs = { url: `http://127.0.0.1:${port}`, pid: router.pid ?? 0 };
    await generator.answered(theirs.url);

    return [
      ...(await sideBySide(generator, ours, theirs, [p, d])),
      await manyStreams(ours, upstream),
    ];
  });

interface Target {
  readonly url: string;
  readonly pid: number;
}

async function sideBySide(
  generator: LoadGenerator,
  ours: Target,
  theirs: Target,
  [p, d]: readonly [string, string],
): Promise<Row[]> {
  const targets = [ours, theirs] as const;
  const busy = (url: string) => generator.busy(url, CONCURRENCY, WINDOW_MS);
  const p50Of = async (url: string, durationMs: number) =>
    median((await generator.busy(url, 1, durationMs)).tookMs);
  for (const { url } of targets) await busy(url);
  const rates: [number[], number[]] = [[], []];
  const busyMs: RoundsOfBoth = [[], []];
  const cpu: [number[], number[]] = [[], []];
  const singleMs: [number[], number[]] = [[], []];
  const direct: number[] = [];
  for (let round = 0; round < ROUNDS; round += 1) {
    for (const at of inTurn(round)) {
      const before = cpuMs(targets[at].pid);
      const { perSecond, tookMs } = await busy(targets[at].url);
      rates[at].push(perSecond);
      busyMs[at].push(tookMs);
      cpu[at].push((cpuMs(targets[at].pid) - before) / tookMs.length);
    }
    direct.push((await p50Of(p, WINDOW_MS / 8)) + (await p50Of(d, WINDOW_MS / 8)));
    for (const at of [0, 1] as const)
      singleMs[at].push(await p50Of(targets[at].url, WINDOW_MS / 4));
  }
  // The same rate for both: half of the slower router's throughput.
  const perSecond = Math.max(1, Math.floor(Math.min(median(rates[0]), median(rates[1])) / 2));
  const paced = (url: string) =>
    generator.paced(url, PACED_CONNECTIONS, perSecond, PACED_WINDOW_MS);
  // Opens the connections.
  for (const { url } of targets) await paced(url);
  const pacedMs: RoundsOfBoth = [[], []];
  let measured = 0;
  for (; measured < MOST_PACED_ROUNDS && pacedMs[0].length < PACED_ROUNDS; measured += 1) {
    const results: LoadResult[] = [];
    for (const at of inTurn(measured)) results[at] = await paced(targets[at].url);
    if (results.some(({ lateMs }) => lateMs > MOST_LATE_MS)) continue;
    for (const at of [0, 1] as const) pacedMs[at].push(results[at]?.tookMs ?? []);
  }
  const again = measured - pacedMs[0].length;
  const ceiling = await generator.busy(d, CONCURRENCY, WINDOW_MS / 2);
  const loads = loadavg()
    .map((each) => each.toFixed(1))
    .join(" ");
  const added = (at: 0 | 1) =>
    singleMs[at].map((value, round) => value - (direct[round] ?? Number.NaN));
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
      spread(added(0), "ms"),
      "<= 1 ms",
      median(added(0)) <= 1,
      spread(added(1), "ms"),
      ROUNDS,
    ),
  ];
}

/** The requests of each round, for both routers: how long they took, in ms. */
type RoundsOfBoth = [(readonly number[])[], (readonly number[])[]];

/**
 * The p99 of all rounds' requests, which a few slow rounds can decide. The median of the rounds'
 * p99 beside it tells whether most rounds are slow; a router's own rare pauses are not in it.
 */
function tail(what: string, rounds: RoundsOfBoth, mostLaterMs: number): Row {
  const [ours, theirs] = [percentile(rounds[0].flat(), 0.99), percentile(rounds[1].flat(), 0.99)];
  const show = (all: RoundsOfBoth[0]) =>
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

async function manyStreams(ours: Target, upstream: ChildProcess): Promise<Row> {
  const limits = readFileSync(`/proc/${ours.pid}/limits`, "utf8");
  const files = Number(/Max open files\s+(\d+)/.exec(limits)?.[1] ?? Number.POSITIVE_INFINITY);
  const count = Math.min(STREAMS, Math.floor((files - SPARE_FILES) / 2));
  const streams = await openStreams(ours.url, count);
  const resident = residentBytes(ours.pid);
  upstream.stdin?.write("release\n");
  const complete = await streams.ended();
  const gibibytes = resident / 2 ** 30;
  const allGibibytes = (gibibytes * STREAMS) / count;
  const limited =
    count < STREAMS
      ? `, as many as ${files} files allow (${STREAMS} at as much each: ${allGibibytes.toFixed(3)} GiB)`
      : "";
  const what = `${count} open streams${limited}: resident memory (${complete} of them then ended complete)`;
  const isMet = allGibibytes <= 1 && complete === count;
  return alone(what, `${gibibytes.toFixed(3)} GiB`, "<= 1 GiB", isMet);
}
