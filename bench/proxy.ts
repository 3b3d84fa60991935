import { type ChildProcess, spawn } from "node:child_process";
import { readFileSync } from "node:fs";
import type { AddressInfo } from "node:net";
import { createServer } from "node:net";
import { loadavg } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { load, pacedLoad } from "./proxy-load.js";
import { openStreams } from "./proxy-streams.js";
import { routerCommand } from "./python-peer.js";
import type { Row } from "./report.js";
import { bestRatio, median, pairRatio, spread } from "./report.js";

const ROUNDS = 5;
const WINDOW_MS = 4_000;
const CONCURRENCY = 32;
const STREAMS = 10_000;
/** Each open stream is two sockets of the router. */
const SPARE_FILES = 500;
const PROXY_CORE = "0";
const OTHER_CORE = "1";

/** The router and what it is compared with, each with one core of its own; load and upstreams share the other. */
export async function proxy(): Promise<readonly Row[]> {
  const children: ChildProcess[] = [];
  const start = (
    core: string,
    command: string,
    args: readonly string[],
    env: NodeJS.ProcessEnv = process.env,
  ) => {
    const child = spawn("taskset", ["-c", core, command, ...args], {
      stdio: ["pipe", "pipe", "inherit"],
      env,
    });
    children.push(child);
    return child;
  };
  spawn("taskset", ["-a", "-p", "-c", OTHER_CORE, String(process.pid)], { stdio: "ignore" });
  try {
    const upstreamScript = fileURLToPath(new URL("./proxy-upstream.ts", import.meta.url));
    const upstream = start(OTHER_CORE, process.execPath, ["--import", "tsx", upstreamScript]);
    const ports = JSON.parse(await line(upstream)) as { prefill: number; decode: number };
    const [p, d] = [`http://127.0.0.1:${ports.prefill}`, `http://127.0.0.1:${ports.decode}`];

    const cli = fileURLToPath(new URL("../packages/proxy/dist/cli.js", import.meta.url));
    const flags = ["--prefill", p, "--decode", d, "--port", "0", "--log-level", "error"];
    const own = start(PROXY_CORE, process.execPath, [cli, ...flags], {
      ...process.env,
      NODE_ENV: "production",
    });
    const ours = { url: /ready (\S+)/.exec(await line(own))?.[1] ?? "", pid: own.pid ?? 0 };

    const port = await freePort();
    const metricsPort = await freePort();
    const router = start(PROXY_CORE, await routerCommand(), [
      ...["--vllm-pd-disaggregation", "--prefill", p, "--decode", d, "--policy", "round_robin"],
      ...["--port", String(port), "--prometheus-port", String(metricsPort), "--log-level", "error"],
      ...["--worker-startup-check-interval", "1", "--kv-connector", "nixl"],
    ]);
    router.stdout?.resume();
    const theirs = { url: `http://127.0.0.1:${port}`, pid: router.pid ?? 0 };
    await ready(theirs.url);

    return [...(await sideBySide(ours, theirs, [p, d])), await manyStreams(ours, upstream)];
  } finally {
    for (const child of children) child.kill("SIGKILL");
  }
}

interface Target {
  readonly url: string;
  readonly pid: number;
}

async function sideBySide(ours: Target, theirs: Target, [p, d]: readonly [string, string]): Promise<Row[]> {
  const targets = [ours, theirs] as const;
  for (const { url } of targets) await load(url, CONCURRENCY, WINDOW_MS);
  const rates: [number[], number[]] = [[], []];
  const closedP99s: [number[], number[]] = [[], []];
  const cpu: [number[], number[]] = [[], []];
  const alone: [number[], number[]] = [[], []];
  const direct: number[] = [];
  for (let round = 0; round < ROUNDS; round += 1) {
    for (const at of round % 2 === 0 ? ([0, 1] as const) : ([1, 0] as const)) {
      const before = cpuMs(targets[at].pid);
      const result = await load(targets[at].url, CONCURRENCY, WINDOW_MS);
      if (result.failed > 0) throw new Error(`${result.failed} requests failed at ${targets[at].url}`);
      rates[at].push(result.perSecond);
      closedP99s[at].push(result.p99Ms);
      cpu[at].push((cpuMs(targets[at].pid) - before) / result.requests);
    }
    direct.push(
      (await load(p, 1, WINDOW_MS / 8, { stream: false })).p50Ms + (await load(d, 1, WINDOW_MS / 8)).p50Ms,
    );
    for (const at of [0, 1] as const) alone[at].push((await load(targets[at].url, 1, WINDOW_MS / 4)).p50Ms);
  }
  const rate = pairRatio(rates[0], rates[1]);
  // A rate that leaves the slower of the two half idle, the same for both.
  const perSecond = Math.max(1, Math.floor(Math.min(median(rates[0]), median(rates[1])) / 2));
  const p99s: [number[], number[]] = [[], []];
  for (let round = 0; round < ROUNDS; round += 1) {
    for (const at of round % 2 === 0 ? ([0, 1] as const) : ([1, 0] as const)) {
      const { p99Ms, failed } = await pacedLoad(targets[at].url, perSecond, WINDOW_MS);
      if (failed > 0) throw new Error(`${failed} requests failed at ${targets[at].url}`);
      p99s[at].push(p99Ms);
    }
  }
  const ceiling = await load(d, CONCURRENCY, WINDOW_MS / 2);
  const cost = pairRatio(cpu[0], cpu[1]);
  const laterBy = ([ours, theirs]: readonly [readonly number[], readonly number[]]) =>
    median(ours.map((each, round) => each - (theirs[round] ?? Number.NaN)));
  const later = laterBy(p99s);
  const closedLater = laterBy(closedP99s);
  const added = (at: 0 | 1) => alone[at].map((value, round) => value - (direct[round] ?? Number.NaN));
  const addedMs = [...added(0)].sort((a, b) => a - b)[ROUNDS >> 1] ?? Number.NaN;
  const what = `${CONCURRENCY} clients, streamed, one core for the router`;
  return [
    {
      what: `requests per second, ${what}: ours / vllm-router's`,
      ours: spread(rates[0], "/s"),
      theirs: spread(rates[1], "/s"),
      ratio: rate,
      best: bestRatio(rates[0], rates[1], "most"),
      wanted: ">= 0.8",
      met: rate >= 0.8,
    },
    {
      what: `p99 at ${perSecond} requests per second, half of the slower one's (median of the differences: ${later.toFixed(2)} ms)`,
      ours: spread(p99s[0], "ms"),
      theirs: spread(p99s[1], "ms"),
      ratio: pairRatio(p99s[0], p99s[1]),
      wanted: "within 2 ms",
      met: later <= 2,
    },
    {
      what: `p99, ${what}, all clients busy (median of the differences: ${closedLater.toFixed(2)} ms)`,
      ours: spread(closedP99s[0], "ms"),
      theirs: spread(closedP99s[1], "ms"),
      ratio: pairRatio(closedP99s[0], closedP99s[1]),
      wanted: "within 2 ms",
      met: closedLater <= 2,
    },
    {
      what: `load generator and one upstream alone, ${CONCURRENCY} clients: what no router could exceed on these cores; load average ${loadavg()
        .map((each) => each.toFixed(1))
        .join(" ")}`,
      ours: `${ceiling.perSecond.toFixed(0)} /s`,
      theirs: "-",
      ratio: undefined,
      wanted: "reported",
      met: undefined,
    },
    {
      what: "processor time of the router per request: ours / theirs",
      ours: spread(cpu[0], "ms"),
      theirs: spread(cpu[1], "ms"),
      ratio: cost,
      best: bestRatio(cpu[0], cpu[1], "least"),
      wanted: "reported",
      met: undefined,
    },
    {
      what: "added latency, one client, p50 (both legs directly is subtracted)",
      ours: spread(added(0), "ms"),
      theirs: spread(added(1), "ms"),
      ratio: undefined,
      wanted: "<= 1 ms",
      met: addedMs <= 1,
    },
  ];
}

async function manyStreams(ours: Target, upstream: ChildProcess): Promise<Row> {
  const limits = readFileSync(`/proc/${ours.pid}/limits`, "utf8");
  const files = Number(/Max open files\s+(\d+)/.exec(limits)?.[1] ?? Number.POSITIVE_INFINITY);
  const count = Math.min(STREAMS, Math.floor((files - SPARE_FILES) / 2));
  const streams = await openStreams(ours.url, count);
  const residentBytes =
    Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${ours.pid}/status`, "utf8"))?.[1]) * 1024;
  upstream.stdin?.write('{"do":"release"}\n');
  const complete = await streams.ended();
  const gibibytes = residentBytes / 2 ** 30;
  const allGibibytes = (gibibytes * STREAMS) / count;
  const limited =
    count < STREAMS
      ? `, as many as ${files} files allow (${STREAMS} at as much each: ${allGibibytes.toFixed(3)} GiB)`
      : "";
  return {
    what: `${count} open streams${limited}: resident memory (${complete} of them then ended complete)`,
    ours: `${gibibytes.toFixed(3)} GiB`,
    theirs: "-",
    ratio: undefined,
    wanted: "<= 1 GiB",
    met: allGibibytes <= 1 && complete === count,
  };
}

/** User and system time of a process and its threads. `taskset` has become the program, so the id is the program's. */
function cpuMs(pid: number): number {
  const fields = readFileSync(`/proc/${pid}/stat`, "utf8").split(") ")[1]?.split(" ") ?? [];
  return (Number(fields[11]) + Number(fields[12])) * 10;
}

async function line(child: ChildProcess): Promise<string> {
  let text = "";
  for await (const chunk of child.stdout ?? []) {
    text += String(chunk);
    const end = text.indexOf("\n");
    if (end !== -1) {
      child.stdout?.resume();
      return text.slice(0, end);
    }
  }
  throw new Error("a process ended before it was ready");
}

function freePort(): Promise<number> {
  return new Promise((resolve) => {
    const server = createServer().listen(0, "127.0.0.1", () => {
      const { port } = server.address() as AddressInfo;
      server.close(() => resolve(port));
    });
  });
}

async function ready(url: string): Promise<void> {
  for (let attempt = 0; attempt < 240; attempt += 1) {
    const answer = await load(url, 1, 1).catch(() => undefined);
    if (answer !== undefined && answer.requests > 0) return;
    await sleep(250);
  }
  throw new Error(`${url} did not become ready`);
}
