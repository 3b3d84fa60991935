// Whether one client or publisher at full size delays others: `/health` and small requests beside each, against the idle proxy of the same run.
import { type ChildProcess, spawn } from "node:child_process";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { SMALL, send } from "./fairness-requests.js";
import { alone, percentile, type Row } from "./report.js";

const PHASE_MS = 5000;
/** Of the p99 of the idle proxy. */
const MOST_TIMES = 5;
const MOST_TURN_MS = 50;
const script = (name: string) => fileURLToPath(new URL(name, import.meta.url));

const ATTACKS = [
  "KV events of 100,000 blocks, and their end",
  "bodies of 225 KB with n: 256",
  "bodies of 2,000,000 token ids",
  "8 clients that leave after 10 ms",
];

export async function fairness(only: readonly string[] | undefined): Promise<readonly Row[]> {
  const upstream = start("./proxy-upstream.ts");
  const { prefill, decode } = JSON.parse(await nextLine(upstream)) as { prefill: number; decode: number };
  const attacker = start("./fairness-attacks.ts");
  const endpoint = await nextLine(attacker);
  const urls = [prefill, decode].map((port) => `http://127.0.0.1:${port}`);
  const proxy = start("./fairness-proxy.ts", ...urls, endpoint);
  const url = await nextLine(proxy);
  const turns: number[] = [];
  void (async () => {
    for (;;) turns.push(Number(await nextLine(proxy)));
  })().catch(() => {});
  const tell = async (attack?: string) => {
    attacker.process.stdin?.write(`${JSON.stringify({ attack, url })}\n`);
    await nextLine(attacker);
  };
  const rows: Row[] = [];
  try {
    await measure(url, 2000);
    for (const name of ATTACKS) {
      if (only !== undefined && !only.some((part) => name.includes(part))) continue;
      const idle = await measure(url, PHASE_MS);
      await tell(name);
      await sleep(500);
      turns.length = 0;
      const busy = await measure(url, PHASE_MS);
      const longest = Math.max(...turns);
      await tell();
      for (const what of ["/health", "small requests"] as const)
        rows.push(rowOf(`${what} beside ${name}: p99`, busy[what], idle[what]));
      const [what, took] = [`longest turn beside ${name}`, `${longest.toFixed(1)} ms`];
      rows.push(alone(what, took, `<= ${MOST_TURN_MS} ms`, longest <= MOST_TURN_MS));
      await sleep(1000);
    }
  } finally {
    for (const child of [proxy, upstream, attacker]) child.process.kill("SIGKILL");
  }
  return rows;
}

interface Measured {
  readonly "/health": readonly number[];
  readonly "small requests": readonly number[];
}

/** Asks in turn for so long. Returns the times, in ms. */
async function measure(url: string, forMs: number): Promise<Measured> {
  const times: Record<keyof Measured, number[]> = { "/health": [], "small requests": [] };
  const timed = async (what: keyof Measured, body?: string) => {
    const startedAt = performance.now();
    await send(url, body);
    times[what].push(performance.now() - startedAt);
  };
  for (const endAt = performance.now() + forMs; performance.now() < endAt; await sleep(2)) {
    await timed("/health");
    await timed("small requests", SMALL);
  }
  return times;
}

function rowOf(what: string, busy: readonly number[], idle: readonly number[]): Row {
  const [ours, theirs] = [percentile(busy, 0.99), percentile(idle, 0.99)];
  const show = (ms: number, of: readonly number[]) => `${ms.toFixed(2)} ms of ${of.length}`;
  const ratio = ours / theirs;
  return {
    ...{ what, ours: show(ours, busy), theirs: `idle ${show(theirs, idle)}`, ratio },
    ...{ wanted: `<= ${MOST_TIMES}`, met: ratio <= MOST_TIMES },
  };
}

interface Child {
  readonly process: ChildProcess;
  readonly lines: AsyncIterator<string>;
}

function start(name: string, ...args: readonly string[]): Child {
  const child = spawn(process.execPath, ["--import", "tsx", script(name), ...args], {
    stdio: ["pipe", "pipe", "inherit"],
  });
  return { process: child, lines: createInterface({ input: child.stdout })[Symbol.asyncIterator]() };
}

async function nextLine({ lines }: Child): Promise<string> {
  const { value, done } = await lines.next();
  if (done === true) throw new Error("a process of the benchmark has ended");
  return value;
}
