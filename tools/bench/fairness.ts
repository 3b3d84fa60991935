// Attacks with a clock: whether one client, publisher or peer at full size delays others. `/health`
// and small requests beside each, against the idle process of the same run.
import { type ChildProcess, fork } from "node:child_process";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { linePeer } from "../clients/python.js";
import { firstLine, freePort } from "./child-processes.js";
import { alone, percentile, type Row, rowOf } from "./report.js";
import type { Run } from "./run.js";

const PHASE_MS = 5000;
/** Of the p99 of the idle process. */
const MOST_TIMES = 5;
const MOST_TURN_MS = 50;
const script = (name: string) => fileURLToPath(new URL(name, import.meta.url));
const TSX = ["--import", "tsx"];

export const SMALL = JSON.stringify({
  model: "m",
  prompt: "a few words",
  max_tokens: 4,
  stream: true,
});

/**
 * Gets `/health`, or posts a completion.
 * @throws A status that is not 200.
 */
export async function send(
  url: string,
  body?: string | Uint8Array<ArrayBuffer>,
  signal: AbortSignal | null = null,
): Promise<void> {
  const headers = { "content-type": "application/json" };
  const answer =
    body === undefined
      ? await fetch(`${url}/health`, { signal })
      : await fetch(`${url}/v1/completions`, { method: "POST", headers, body, signal });
  await answer.arrayBuffer();
  if (answer.status !== 200) throw new Error(`status ${answer.status}`);
}

interface Victim {
  readonly url: string;
  /** What the attacker is told: the URL of its HTTP, or the port of its side channel. */
  readonly target: string;
  readonly small: string;
  /** The longest turns of its event loop, in ms, of each half second. */
  readonly turns: number[];
  /** What it took while nothing was done to it, before each attack. */
  readonly idle: Measured[];
}

interface Measured {
  readonly "/health": readonly number[];
  readonly "small requests": readonly number[];
}

async function measure({ url, small }: Victim, forMs: number): Promise<Measured> {
  const times = { "/health": [] as number[], "small requests": [] as number[] };
  const timed = async (what: keyof Measured, body?: string) => {
    const startedAt = performance.now();
    await send(url, body);
    times[what].push(performance.now() - startedAt);
  };
  for (const endAt = performance.now() + forMs; performance.now() < endAt; await sleep(2)) {
    await timed("/health");
    await timed("small requests", small);
  }
  return times;
}

export async function fairness(run: Run): Promise<readonly Row[]> {
  const children: ChildProcess[] = [];
  /** Starts a program. Resolves with its first line, and its turns as it tells them. */
  const start = async (name: string, ...args: string[]) => {
    const turns: number[] = [];
    const child = fork(script(name), args, {
      execArgv: [...TSX, "--import", script("./fairness-turns.ts")],
      stdio: ["pipe", "pipe", "inherit", "ipc"],
    }).on("message", (longest) => turns.push(Number(longest)));
    children.push(child);
    return { line: await firstLine(child), turns };
  };
  // An attacker has a machine of its own. Here it gets what the others leave of the cores.
  const attacker = linePeer("nice", [process.execPath, ...TSX, script("./fairness-attacks.ts")]);
  const endpoint = await attacker.ask<string>({});
  const victims = {
    async proxy(): Promise<Victim> {
      // Two P and two D, whose HTTP is in C: busy engines would make the small requests wait, and
      // not the proxy.
      const urls: string[] = [];
      for (let pair = 0; pair < 2; pair += 1) {
        const { line } = await start("./fast-upstream.ts");
        const { prefill, decode } = JSON.parse(line) as Record<string, number>;
        urls.push(`http://127.0.0.1:${prefill}`, `http://127.0.0.1:${decode}`);
      }
      const { line: url, turns } = await start("./fairness-proxy.ts", ...urls, endpoint);
      return { url, target: url, small: SMALL, turns, idle: [] };
    },
    async engine(): Promise<Victim> {
      const port = await freePort();
      const kvTransferConfig = { kv_connector: "NixlPushConnector", kv_role: "kv_producer" };
      const config = JSON.stringify({ sideChannelPort: port, kvTransferConfig });
      const flags = ["--log-level", "silent", "--port", "0", "--config", config];
      const { line, turns } = await start("../../apps/demo/dist/main.js", "prefill", ...flags);
      const { url } = JSON.parse(line) as { url: string };
      const small = JSON.stringify({ prompt: [1, 2, 3], max_tokens: 1 });
      return { url, target: String(port), small, turns, idle: [] };
    },
  };
  const running = new Map<keyof typeof victims, Victim>();
  const attack = (name: string, kind: keyof typeof victims) => async () => {
    const victim = running.get(kind) ?? (await victims[kind]());
    if (!running.has(kind)) await measure(victim, 2000);
    running.set(kind, victim);
    const forMs = run.short ? PHASE_MS / 5 : PHASE_MS;
    victim.idle.push(await measure(victim, forMs));
    await attacker.ask({ attack: name, target: victim.target });
    await sleep(500);
    victim.turns.length = 0;
    const busy = await measure(victim, forMs);
    const longest = Math.max(...victim.turns);
    await attacker.ask({});
    await sleep(1000);

    const took = `${longest.toFixed(1)} ms`;
    const isShort = longest <= MOST_TURN_MS;
    return [
      ...(["/health", "small requests"] as const).map((what) => {
        const idle = victim.idle.flatMap((one) => one[what]);
        return delayRow(`${what} beside ${name}: p99`, busy[what], idle);
      }),
      alone(`longest turn beside ${name}`, took, `<= ${MOST_TURN_MS} ms`, isShort),
    ];
  };
  const parts = {
    events: attack("KV events of 100,000 blocks, and their end", "proxy"),
    choices: attack("bodies of 225 KB with n: 256", "proxy"),
    tokens: attack("bodies of 2,000,000 token ids", "proxy"),
    leaving: attack("8 clients that leave after 10 ms", "proxy"),
    registrations: attack("registrations of 700,000 blocks", "engine"),
  };
  try {
    return await run.parts(parts, run);
  } finally {
    for (const child of children) child.kill("SIGKILL");
    await attacker.close();
  }
}

function delayRow(what: string, busy: readonly number[], idle: readonly number[]): Row {
  const [ours, theirs] = [percentile(busy, 0.99), percentile(idle, 0.99)];
  const show = (ms: number, of: readonly number[]) => `${ms.toFixed(2)} ms of ${of.length}`;
  const shown = [show(ours, busy), `idle ${show(theirs, idle)}`] as const;
  return rowOf(what, shown, ours / theirs, "<=", MOST_TIMES);
}
