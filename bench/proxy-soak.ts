// npm run soak:proxy [-- --minutes 30 --clients 16 --every-s 20]: requests through kv-proxy, with pairing, KV events, token ids and the disaggregation
// rule, while its instances are killed and started again, each time as the other of two versions that do not fit. A request that fails before its
// client has received a byte could have been retried, so there must be none; nor may one go to a pair that does not fit. Memory must not grow.
import { type ChildProcess, spawn } from "node:child_process";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import { Agent } from "undici";

const { values } = parseArgs({
  options: {
    minutes: { type: "string", default: "30" },
    clients: { type: "string", default: "16" },
    "every-s": { type: "string", default: "20" },
  },
});
const durationMs = Number(values.minutes) * 60_000;
const everyMs = Number(values["every-s"]) * 1_000;
const GROWTH_LIMIT = 1.25;
const PAIRS = 3;

interface Pair {
  readonly child: ChildProcess;
  /** Of prefill, decode and the side channel. */
  readonly ports: readonly [number, number, number];
  readonly version: number;
}

const upstreamScript = fileURLToPath(new URL("./proxy-upstream.ts", import.meta.url));
const cli = fileURLToPath(new URL("../packages/proxy/src/cli.ts", import.meta.url));

const VERSIONS = ["0.32.0", "0.33.0"];

async function startUpstream(ports: Pair["ports"], version: number): Promise<Pair> {
  const args = ["--import", "tsx", upstreamScript, ...ports.map(String), VERSIONS[version] ?? ""];
  const child = spawn(process.execPath, args, { stdio: ["pipe", "pipe", "inherit"] });
  const { prefill, decode, sideChannel } = JSON.parse(await firstLine(child)) as Record<string, number>;
  return { child, ports: [prefill ?? 0, decode ?? 0, sideChannel ?? 0], version };
}

async function firstLine(child: ChildProcess): Promise<string> {
  let text = "";
  for await (const chunk of child.stdout ?? []) {
    text += String(chunk);
    if (text.includes("\n")) break;
  }
  return text.slice(0, text.indexOf("\n"));
}

const residentMebibytes = (pid: number) =>
  Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${pid}/status`, "utf8"))?.[1]) / 1024;

const pairs = await Promise.all(Array.from({ length: PAIRS }, (_, at) => startUpstream([0, 0, 0], at % 2)));
const urls = (at: 0 | 1) => pairs.map(({ ports }) => `127.0.0.1:${ports[at]}`);
const sideChannels = pairs.map(({ ports }) => String(ports[2]));
const proxy = spawn(
  process.execPath,
  [
    "--import",
    "tsx",
    cli,
    "--port",
    "0",
    "--prefill",
    ...urls(0),
    "--decode",
    ...urls(1),
    "--prefill-side-channel-port",
    ...sideChannels,
    "--decode-side-channel-port",
    ...sideChannels,
    ...["--routing", "prefix-aware", "--disaggregate-above", "0"],
    "--log-level",
    "error",
  ],
  { stdio: ["ignore", "pipe", "inherit"] },
);
const url = /ready (\S+)/.exec(await firstLine(proxy))?.[1] ?? "";
const pid = proxy.pid ?? 0;

const counts = { complete: 0, cut: 0, lost: 0, restarts: 0 };
const agent = new Agent({ connections: Number(values.clients), pipelining: 1 });
const endAtMs = Date.now() + durationMs;

/** The error messages of lost requests, with their counts. */
const why = new Map<string, number>();

function ask(): Promise<"complete" | "cut" | "lost"> {
  return new Promise((resolve) => {
    let seen = "";
    let status = 0;
    const lost = (reason: string) => {
      why.set(reason, (why.get(reason) ?? 0) + 1);
      resolve("lost");
    };
    const body = '{"model":"m","prompt":"some words","stream":true}';
    agent.dispatch(
      {
        origin: url,
        path: "/v1/completions",
        method: "POST",
        headers: { "content-type": "application/json" },
        body,
      },
      {
        onRequestStart() {},
        onResponseStart(_controller, given) {
          status = given;
        },
        onResponseData(_controller, chunk) {
          seen = (seen + chunk.toString("latin1")).slice(-400);
        },
        onResponseEnd() {
          if (status === 200) resolve(seen.endsWith("data: [DONE]\n\n") ? "complete" : "cut");
          else lost(`${status} ${seen}`);
        },
        onResponseError(_controller, error) {
          if (seen === "") lost(error.message);
          else resolve("cut");
        },
      },
    );
  });
}
async function client(): Promise<void> {
  while (Date.now() < endAtMs) counts[await ask()] += 1;
}
async function chaos(): Promise<void> {
  for (let turn = 0; Date.now() + everyMs < endAtMs; turn += 1) {
    await sleep(everyMs);
    const pair = pairs[turn % PAIRS];
    if (pair === undefined) return;
    pair.child.kill("SIGKILL");
    await once(pair.child, "close");
    pairs[turn % PAIRS] = await startUpstream(pair.ports, 1 - pair.version);
    counts.restarts += 1;
  }
}

const memory: number[] = [];
const watching = setInterval(() => memory.push(residentMebibytes(pid)), 1_000);
await Promise.all([chaos(), ...Array.from({ length: Number(values.clients) }, client)]);
clearInterval(watching);
await agent.close();
proxy.kill("SIGTERM");
const [code] = (await once(proxy, "close")) as [number | null];
for (const { child } of pairs) child.kill("SIGKILL");

// The first fifth is warm-up. The first third of the rest is compared with its last third.
const steady = memory.slice(Math.floor(memory.length / 5));
const third = Math.max(1, Math.floor(steady.length / 3));
const mean = (list: readonly number[]) => list.reduce((sum, value) => sum + value, 0) / list.length;
const [early, late] = [mean(steady.slice(0, third)), mean(steady.slice(-third))];
const growth = late / early;
console.log(
  JSON.stringify({ ...counts, early_mib: Math.round(early), late_mib: Math.round(late), exit_code: code }),
);
for (const [reason, count] of why) console.log(`lost ${count}: ${reason}`);
const good = counts.lost === 0 && counts.complete > 0 && growth <= GROWTH_LIMIT && code === 0;
console.log(
  good ? "ok" : `not ok: lost must be 0, growth ${growth.toFixed(2)} at most ${GROWTH_LIMIT}, exit code 0`,
);
process.exitCode = good ? 0 : 1;
