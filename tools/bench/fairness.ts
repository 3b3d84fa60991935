// Whether one publisher or peer at full size delays others, against the idle process of the
// same run.

import { type ChildProcess, fork } from "node:child_process";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { freePort } from "@kv/testing/http/listening";
import { linePeer } from "../clients/python.js";
import { startEngines } from "./arena/engines.js";
import { firstLine } from "./child-processes.js";
import { alone, percentile, type Row, rowOf } from "./report.js";
import type { Run } from "./run.js";

const PHASE_MS = 5000;
const MOST_TIMES = 5;
const MOST_TURN_MS = 50;
const script = (name: string) => join(import.meta.dirname, name);
const TSX = ["--import", "tsx"];

const SMALL = JSON.stringify({
  model: "m",
  prompt: "a few words",
  max_tokens: 4,
  stream: true,
});

/** @throws A status that is not 200. */
async function send(url: string, body?: string): Promise<void> {
  const headers = { "content-type": "application/json" };
  const answer =
    body === undefined
      ? await fetch(`${url}/health`)
      : await fetch(`${url}/v1/completions`, { method: "POST", headers, body });
  await answer.arrayBuffer();
  if (answer.status !== 200) throw new Error(`status ${answer.status}`);
}

interface Victim {
  readonly url: string;
  /** The URL of the HTTP, or the port of the side channel. */
  readonly target: string;
  readonly small: string;
  /** The longest turn of the event loop, in ms, of each half second. */
  readonly turns: number[];
  /** Before each attack. */
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

export async function fairness(run: Run) {
  // Their HTTP is in C: busy engines would make the small requests wait.
  await using engines = await startEngines("0,1", 2);
  const children: ChildProcess[] = [];
  const start = async (name: string, ...args: string[]) => {
    const turns: number[] = [];
    const child = fork(script(name), args, {
      execArgv: [...TSX, "--import", script("./fairness-turns.ts")],
      stdio: ["pipe", "pipe", "inherit", "ipc"],
    }).on("message", (longest) => turns.push(Number(longest)));
    children.push(child);
    return { line: await firstLine(child), turns };
  };
  const demo = async (role: string, config: object) => {
    const flags = ["--log-level", "silent", "--config", JSON.stringify(config)];
    const { line, turns } = await start("../../apps/demo/dist/main.js", role, ...flags);
    return { url: (JSON.parse(line) as { url: string }).url, turns };
  };
  // Here an attacker gets what the others leave of the cores.
  const attacker = linePeer("nice", [process.execPath, ...TSX, script("./fairness-attacks.ts")]);
  const endpoint = await attacker.ask<string>({});
  const victims = {
    async proxy(): Promise<Victim> {
      const [prefill, otherPrefill] = engines.prefills;
      const { url, turns } = await demo("proxy", {
        port: 0,
        prefillers: [{ url: prefill }, { url: otherPrefill, kvEvents: endpoint }],
        decoders: engines.decodes,
        routing: { prefill: "prefix-aware", decode: "round-robin" },
        pairing: { mode: "off" },
      });
      return { url, target: url, small: SMALL, turns, idle: [] };
    },
    async engine(): Promise<Victim> {
      const sideChannelPort = await freePort();
      const kvTransferConfig = { kv_connector: "NixlPushConnector", kv_role: "kv_producer" };
      const config = { port: 0, sideChannelPort, kvTransferConfig };
      const small = JSON.stringify({ prompt: [1, 2, 3], max_tokens: 1 });
      const target = String(sideChannelPort);
      return { ...(await demo("prefill", config)), target, small, idle: [] };
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
