import { type ChildProcess, spawn } from "node:child_process";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { cpuMs } from "./child-processes.js";
import { chunk, jsonAnswer, LAST_CHUNK, STREAM_HEAD, startHttpAnswers } from "./http-answers.js";
import { LoadGenerator } from "./proxy-load.js";
import { compare, inTurn, type Row } from "./report.js";
import { prefillAnswer, STREAM } from "./upstream-answers.js";

const ROUNDS = 5;
const WINDOW_MS = 3_000;
/** Each worker compiles its code for itself. */
const WARM_MS_PER_WORKER = 6_000;
const CONNECTIONS = 64;
const CORES = "0,1";
const CLI = fileURLToPath(new URL("../../packages/proxy/dist/cli.js", import.meta.url));

/**
 * One worker and two on the same two cores, with the load generator and the servers on them too.
 * These are in C, with answers made before: what they take of the cores is not there for the proxy.
 */
export async function proxyWorkers(): Promise<readonly Row[]> {
  spawn("taskset", ["-a", "-p", "-c", CORES, String(process.pid)], { stdio: "ignore" });
  const servers = await startHttpAnswers(CORES, [
    { "/v1/completions": jsonAnswer(prefillAnswer("engine", 5600)) },
    { "/v1/completions": `${STREAM_HEAD}${chunk(STREAM)}${LAST_CHUNK}` },
  ]);
  const [p = 0, d = 0] = servers.ports;
  const generator = await LoadGenerator.start(CORES);
  const helpersMs = () => cpuMs(servers.child.pid ?? 0) + cpuMs(generator.pid);
  const load = async (port: number, durationMs: number) => {
    const { tookMs } = await generator.busy(`http://127.0.0.1:${port}`, CONNECTIONS, durationMs);
    return tookMs.length;
  };
  const [one, two] = [await start(1, p, d), await start(2, p, d)];
  try {
    const rates: [number[], number[]] = [[], []];
    const cpu: [number[], number[]] = [[], []];
    const share: [number[], number[]] = [[], []];
    for (const { port, warmMs } of [one, two]) await load(port, warmMs);
    for (let round = 0; round < ROUNDS; round += 1) {
      for (const at of inTurn(round)) {
        const target = at === 0 ? one : two;
        const [beforeMs, ownMs] = [cpuMs(target.pid), helpersMs()];
        const count = await load(target.port, WINDOW_MS);
        rates[at].push((count * 1000) / WINDOW_MS);
        cpu[at].push((cpuMs(target.pid) - beforeMs) / count);
        share[at].push((helpersMs() - ownMs) / count);
      }
    }
    const what = `requests per second, ${CONNECTIONS} clients, on the same two cores: 2 workers / 1 worker`;
    const time = "processor time of all processes of the proxy per request: 2 workers / 1 worker";
    const beside = "processor time of load generator and servers per request: the same";
    return [
      compare(what, [rates[1], rates[0]], "/s", ">=", 1.5),
      compare(time, [cpu[1], cpu[0]], "ms", "<="),
      compare(beside, [share[1], share[0]], "ms", "<="),
    ];
  } finally {
    for (const { child } of [one, two]) child.kill("SIGTERM");
    servers.child.kill("SIGKILL");
    generator.stop();
    await sleep(500);
  }
}

interface Target {
  readonly child: ChildProcess;
  readonly pid: number;
  readonly port: number;
  readonly warmMs: number;
}

async function start(workers: number, prefill: number, decode: number): Promise<Target> {
  const flags = [
    "--prefill",
    `127.0.0.1:${prefill}`,
    "--decode",
    `127.0.0.1:${decode}`,
    "--port",
    "0",
    "--prefill-routing",
    "prefix-aware",
    "--decode-routing",
    "prefix-aware",
    "--disaggregate-above",
    "0",
    "--pairing",
    "off",
    "--workers",
    String(workers),
  ];
  const child = spawn("taskset", ["-c", CORES, process.execPath, CLI, ...flags], {
    // The log is written, as by default.
    stdio: ["ignore", "pipe", "ignore"],
    env: { ...process.env, NODE_ENV: "production" },
  });
  for await (const line of createInterface({ input: child.stdout })) {
    const port = Number(/ready http:\/\/[^:]+:(\d+)/.exec(line)?.[1]);
    return { child, pid: child.pid ?? 0, port, warmMs: workers * WARM_MS_PER_WORKER };
  }
  throw new Error("kv-proxy ended before it was ready");
}
