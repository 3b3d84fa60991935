import { type ChildProcess, fork } from "node:child_process";
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { zmqSideChannel } from "@kv/side-channel";

const host = "127.0.0.1";

/** What was seen of the attacked process and of those whom it served meanwhile. */
export interface Observed {
  /** Growth of its largest resident memory, in MiB. */
  readonly grownMiB: number;
  /** Longest time in which it did not answer a message of its parent, in milliseconds. */
  readonly stallMs: number;
  readonly honest: { readonly handshakes: number; readonly http: number; readonly failed: number };
}

/**
 * Starts `serve` or `ask PORT` of `side-channel-victim.ts` in a process of its own, and resolves
 * with its first message.
 */
export async function startVictim<T>(
  ...args: string[]
): Promise<{ child: ChildProcess; first: Promise<T> }> {
  const program = fileURLToPath(new URL("./side-channel-victim.ts", import.meta.url));
  const child = fork(program, args, { execArgv: ["--import", "tsx"] });
  const first = new Promise<T>((resolve, reject) => {
    child.on("message", (message) => {
      if (!("echo" in (message as object))) resolve(message as T);
    });
    child.on("exit", (code, signal) =>
      reject(new Error(`the attacked process ended: ${signal ?? code}`)),
    );
  });
  first.catch(() => {});
  return { child, first };
}

/** Observes a process from outside while `attack` runs. */
export async function watch(
  child: ChildProcess,
  attack: () => Promise<void>,
): Promise<Omit<Observed, "honest">> {
  const before = memoryMiB(child, "VmRSS");
  let pendingSinceMs: number | undefined;
  let stallMs = 0;
  const measure = () => {
    if (pendingSinceMs !== undefined)
      stallMs = Math.max(stallMs, performance.now() - pendingSinceMs);
  };
  const echoed = (message: unknown) => {
    if (!("echo" in (message as object))) return;
    measure();
    pendingSinceMs = undefined;
  };
  child.on("message", echoed);
  const timer = setInterval(() => {
    measure();
    if (pendingSinceMs !== undefined || !child.connected) return;
    pendingSinceMs = performance.now();
    child.send(0);
  }, 10);
  try {
    await attack();
  } finally {
    clearInterval(timer);
    measure();
    child.off("message", echoed);
  }
  return { grownMiB: Math.round(memoryMiB(child, "VmHWM") - before), stallMs: Math.round(stallMs) };
}

/**
 * Attacks a listener in another process, while honest peers shake hands with it and clients use its
 * HTTP, each with new connections.
 */
export async function attackListener(
  attack: (
    target: { readonly host: string; readonly port: number },
    signal: AbortSignal,
  ) => Promise<void>,
): Promise<Observed> {
  const { child, first } = await startVictim<{ port: number; http: number }>("serve");
  const { port, http } = await first;
  const honest = { handshakes: 0, http: 0, failed: 0 };
  const count = (what: keyof typeof honest) => {
    honest[what] += 1;
  };
  const over = new AbortController();
  const serveHonest = async () => {
    while (!over.signal.aborted) {
      const side = zmqSideChannel();
      const frames = [Buffer.alloc(17)];
      await side.request({ host, port, frames, timeoutMs: 5000 }).then(
        () => count("handshakes"),
        () => count("failed"),
      );
      await side.close();
      const answer = fetch(`http://${host}:${http}`, {
        headers: { connection: "close" },
        signal: AbortSignal.timeout(5000),
      });
      await answer
        .then((response) => response.text())
        .then(
          () => count("http"),
          () => count("failed"),
        );
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  };
  try {
    const served = serveHonest();
    const seen = await watch(child, async () => {
      // After two minutes the result is what was seen until then.
      const limit = setTimeout(() => over.abort(), 120_000);
      await attack({ host, port }, over.signal);
      clearTimeout(limit);
    });
    over.abort();
    await served;
    return { ...seen, honest };
  } finally {
    over.abort();
    child.kill("SIGKILL");
  }
}

/** An observation in words. */
export function describeObserved({ grownMiB, stallMs, honest }: Observed): string {
  const { handshakes, http, failed } = honest;
  return `+${grownMiB} MiB, longest stall ${stallMs} ms; beside it ${handshakes} handshakes and ${http} HTTP requests served, ${failed} failed`;
}

/** Nothing grew or stalled beyond what a busy machine explains, and others were served. */
export function withstood({ grownMiB, stallMs, honest }: Observed): boolean {
  return grownMiB <= 256 && stallMs <= 2000 && honest.failed === 0 && honest.handshakes > 0;
}

function memoryMiB({ pid }: ChildProcess, name: "VmRSS" | "VmHWM"): number {
  const status = readFileSync(`/proc/${pid}/status`, "latin1");
  return Number(new RegExp(`^${name}:\\s+(\\d+)`, "m").exec(status)?.[1] ?? 0) / 1024;
}
