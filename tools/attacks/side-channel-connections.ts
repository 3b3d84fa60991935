import { type ChildProcess, fork } from "node:child_process";
import { fileURLToPath } from "node:url";
import type { AttackResult, FloodTarget } from "./support/attack.js";
import { attackListener, describeObserved, withstood } from "./support/attacked-side-channel.js";

const PROCESSES = 2;
const PER_PROCESS = 10_200;

interface Counts {
  readonly begun: number;
  readonly ended: number;
}

/**
 * Opens connections from other processes, because one has not enough descriptors, until the signal
 * aborts.
 */
function openFrom(
  port: number,
  kind: "greeted" | "silent",
  signal: AbortSignal,
): Promise<Counts[]> {
  const program = fileURLToPath(new URL("./support/greeted-connections.ts", import.meta.url));
  const children: ChildProcess[] = [];
  signal.addEventListener("abort", () => {
    for (const child of children) child.kill("SIGKILL");
  });
  return Promise.all(
    Array.from({ length: PROCESSES }, () => {
      const child = fork(program, [`${port}`, `${PER_PROCESS}`, kind], {
        execArgv: ["--import", "tsx"],
      });
      children.push(child);
      return new Promise<Counts>((resolve) => {
        child.once("message", (counts) => resolve(counts as Counts));
        child.once("exit", () => resolve({ begun: 0, ended: 0 }));
      });
    }),
  );
}

async function attackWith(kind: "greeted" | "silent") {
  let counts: Counts[] = [];
  const seen = await attackListener(async ({ port }, signal) => {
    const over = new AbortController();
    signal.addEventListener("abort", () => over.abort());
    try {
      counts = await openFrom(port, kind, over.signal);
      // Others have to be served while the connections stay.
      await new Promise((resolve) => setTimeout(resolve, 8000));
    } finally {
      over.abort();
    }
  });
  const sum = (member: keyof Counts) => counts.reduce((total, each) => total + each[member], 0);
  return { seen, begun: sum("begun"), ended: sum("ended") };
}

/**
 * 20,400 greeted connections, and as many that send half a greeting: more than a process has
 * descriptors.
 */
export async function run(): Promise<AttackResult> {
  const greeted = await attackWith("greeted");
  const silent = await attackWith("silent");
  return {
    attack: "side channel: connections that are kept, greeted and half greeted",
    tries: `${greeted.begun} and ${silent.begun} connections`,
    result: `greeted: ${describeObserved(greeted.seen)}; half greeted: ${describeObserved(silent.seen)}`,
    ok: withstood(greeted.seen) && withstood(silent.seen),
  };
}

/** The same against a running demo. */
export async function flood({ sideChannel }: FloodTarget, signal: AbortSignal): Promise<void> {
  if (signal.aborted) return;
  await openFrom(sideChannel.port, "greeted", signal);
  if (!signal.aborted)
    await new Promise((resolve) => signal.addEventListener("abort", resolve, { once: true }));
}
