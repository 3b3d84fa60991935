// Whether one client, publisher or peer at full size delays others: `/health` and small requests
// beside each, against the idle process of the same run.
import { type ChildProcess, spawn } from "node:child_process";
import { setPriority } from "node:os";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { freePort } from "./child-processes.js";
import { SMALL, send } from "./fairness-requests.js";
import { alone, percentile, type Row } from "./report.js";

const PHASE_MS = 5000;
/** Of the p99 of the idle process. */
const MOST_TIMES = 5;
const MOST_TURN_MS = 50;
/** The begin of a line of `fairness-turns.ts`. */
const TURN = "turn ";
const script = (name: string) => fileURLToPath(new URL(name, import.meta.url));

/** What is attacked: by its HTTP server, or by the side channel at the port. */
const ATTACKS = {
  "KV events of 100,000 blocks, and their end": "proxy",
  "bodies of 225 KB with n: 256": "proxy",
  "bodies of 2,000,000 token ids": "proxy",
  "8 clients that leave after 10 ms": "proxy",
  "registrations of 700,000 blocks": "engine",
} as const;

/** A process whose delays are measured. */
interface Victim {
  readonly url: string;
  /** What the attacker is told. */
  readonly target: string;
  /** A small request. */
  readonly small: string;
  /** The longest turns of its event loop, in ms, of each half second. */
  readonly turns: number[];
  /** What it took while nothing was done to it, before each attack. */
  readonly idle: Measured[];
}

export async function fairness(only: readonly string[] | undefined): Promise<readonly Row[]> {
  const children: Child[] = [];
  const started = (name: string, ...args: string[]) => {
    const child = start(name, ...args);
    children.push(child);
    return child;
  };
  const attacker = started("./fairness-attacks.ts");
  // An attacker has a machine of its own. Here it gets what the others leave of the cores.
  setPriority(attacker.process.pid ?? 0, 10);
  const endpoint = await nextLine(attacker);
  const victims = {
    async proxy(): Promise<Victim> {
      // Two P and two D, whose HTTP is in C: busy engines would make the small requests wait, and
      // not the proxy.
      const pairs = [started("./fast-upstream.ts"), started("./fast-upstream.ts")].map(nextLine);
      const urls = (await Promise.all(pairs)).flatMap((line) => {
        const { prefill, decode } = JSON.parse(line) as Ports;
        return [prefill, decode].map((port) => `http://127.0.0.1:${port}`);
      });
      const proxy = started("./fairness-proxy.ts", ...urls, endpoint);
      const url = await nextLine(proxy);
      return { url, target: url, small: SMALL, turns: readTurns(proxy), idle: [] };
    },
    async engine(): Promise<Victim> {
      const port = String(await freePort());
      const settings = { kv_connector: "NixlPushConnector", kv_role: "kv_producer" };
      const engine = started(
        "../apps/demo/dist/main.js",
        "prefill",
        "--log-level",
        "silent",
        "--port",
        "0",
        "--config",
        JSON.stringify({ sideChannelPort: Number(port), kvTransferConfig: settings }),
      );
      const { url } = JSON.parse(await nextLine(engine)) as { url: string };
      const small = JSON.stringify({ prompt: [1, 2, 3], max_tokens: 1 });
      return { url, target: port, small, turns: readTurns(engine), idle: [] };
    },
  };
  const running = new Map<keyof typeof victims, Victim>();
  const rows: Row[] = [];
  const ended: { name: string; victim: Victim; busy: Measured; longest: number }[] = [];
  try {
    for (const [name, kind] of Object.entries(ATTACKS)) {
      if (only !== undefined && !only.some((part) => name.includes(part))) continue;
      const victim = running.get(kind) ?? (await victims[kind]());
      if (!running.has(kind)) await measure(victim, 2000);
      running.set(kind, victim);
      const tell = async (attack?: string) => {
        attacker.process.stdin?.write(`${JSON.stringify({ attack, target: victim.target })}\n`);
        await nextLine(attacker);
      };
      victim.idle.push(await measure(victim, PHASE_MS));
      await tell(name);
      await sleep(500);
      victim.turns.length = 0;
      const busy = await measure(victim, PHASE_MS);
      const longest = Math.max(...victim.turns);
      await tell();
      ended.push({ name, victim, busy, longest });
      await sleep(1000);
    }
  } finally {
    for (const child of children) child.process.kill("SIGKILL");
  }
  for (const { name, victim, busy, longest } of ended) {
    for (const what of ["/health", "small requests"] as const) {
      const idle = victim.idle.flatMap((one) => one[what]);
      rows.push(rowOf(`${what} beside ${name}: p99`, busy[what], idle));
    }
    const [what, took] = [`longest turn beside ${name}`, `${longest.toFixed(1)} ms`];
    rows.push(alone(what, took, `<= ${MOST_TURN_MS} ms`, longest <= MOST_TURN_MS));
  }
  return rows;
}

interface Ports {
  readonly prefill: number;
  readonly decode: number;
}

/** What `fairness-turns.ts` prints in a process. */
function readTurns(child: Child): number[] {
  const turns: number[] = [];
  void (async () => {
    for await (const line of child.lines) turns.push(Number(line.slice(TURN.length)));
  })().catch(() => {});
  return turns;
}

interface Measured {
  readonly "/health": readonly number[];
  readonly "small requests": readonly number[];
}

/** Asks in turn for so long. Returns the times, in ms. */
async function measure({ url, small }: Victim, forMs: number): Promise<Measured> {
  const times: Record<keyof Measured, number[]> = { "/health": [], "small requests": [] };
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

function rowOf(what: string, busy: readonly number[], idle: readonly number[]): Row {
  const [ours, theirs] = [percentile(busy, 0.99), percentile(idle, 0.99)];
  const show = (ms: number, of: readonly number[]) => `${ms.toFixed(2)} ms of ${of.length}`;
  const ratio = ours / theirs;
  return {
    what,
    ours: show(ours, busy),
    theirs: `idle ${show(theirs, idle)}`,
    ratio,
    wanted: `<= ${MOST_TIMES}`,
    met: ratio <= MOST_TIMES,
  };
}

interface Child {
  readonly process: ChildProcess;
  readonly lines: AsyncIterableIterator<string>;
}

function start(name: string, ...args: readonly string[]): Child {
  const imports = ["--import", "tsx", "--import", script("./fairness-turns.ts")];
  const child = spawn(process.execPath, [...imports, script(name), ...args], {
    stdio: ["pipe", "pipe", "inherit"],
  });
  return {
    process: child,
    lines: createInterface({ input: child.stdout })[Symbol.asyncIterator](),
  };
}

async function nextLine(child: Child): Promise<string> {
  const { value, done } = await child.lines.next();
  if (done === true) throw new Error("a process of the benchmark has ended");
  return value.startsWith(TURN) ? nextLine(child) : value;
}
