import { type ChildProcess, spawn } from "node:child_process";
import { readdirSync, readFileSync } from "node:fs";
import { connect, type Socket } from "node:net";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";

const path = (file: string) => fileURLToPath(new URL(`../../../${file}`, import.meta.url));

/** kv-proxy in a process of its own, with instances that answer at once in another one. */
export interface AttackedProxy {
  readonly url: string;
  readonly adminUrl: string;
  /** Requests that reached the prefill server, and the most at once. */
  counts(): Promise<{ readonly requests: number; readonly most: number }>;
  /** Resident memory in MiB. */
  residentMib(): number;
  /** Open descriptors. */
  descriptors(): number;
  close(): void;
}

/** Starts the proxy. `flags` are further flags. */
export async function startProxy(flags: readonly string[] = []): Promise<AttackedProxy> {
  const instances = start("tools/attacks/support/slow-instance.ts", []);
  const ports = JSON.parse(await firstLine(instances)) as { prefill: number; decode: number };
  const proxy = start("packages/proxy/src/cli.ts", [
    ...["--prefill", `127.0.0.1:${ports.prefill}`, "--decode", `127.0.0.1:${ports.decode}`],
    ...["--port", "0", "--admin-port", "0", "--log-level", "silent", ...flags],
  ]);
  const ready = await firstLine(proxy);
  const [, url = "", adminUrl = ""] = /ready (\S+) .* admin (\S+)/.exec(ready) ?? [];
  const status = () => readFileSync(`/proc/${proxy.pid}/status`, "utf8");
  return {
    url,
    adminUrl,
    async counts() {
      const response = await fetch(`http://127.0.0.1:${ports.prefill}/counts`);
      return (await response.json()) as { requests: number; most: number };
    },
    residentMib: () => Number(/VmRSS:\s+(\d+)/.exec(status())?.[1]) / 1024,
    descriptors: () => readdirSync(`/proc/${proxy.pid}/fd`).length,
    close() {
      proxy.kill("SIGKILL");
      instances.kill("SIGKILL");
    },
  };
}

function start(file: string, args: readonly string[]): ChildProcess {
  return spawn(process.execPath, ["--import", "tsx", path(file), ...args], {
    cwd: path(""),
    stdio: ["pipe", "pipe", "inherit"],
  });
}

async function firstLine(child: ChildProcess): Promise<string> {
  return String((await linesOf(child).next()).value);
}

function linesOf(child: ChildProcess): AsyncIterator<string> {
  if (child.stdout === null) throw new Error("the process has no stdout");
  return createInterface({ input: child.stdout })[Symbol.asyncIterator]();
}

/** What honest clients saw while `attack` ran. */
export interface Observed {
  readonly right: number;
  readonly wrong: number;
  /** The longest time that one of them waited. It includes each stall of the proxy's event loop. */
  readonly longestMs: number;
  /** How much resident memory grew at most, in MiB. */
  readonly grownMib: number;
  readonly mostDescriptors: number;
}

/** Runs an attack while a client in another process, at another address, sends a request every 20 ms. */
export async function observe(proxy: AttackedProxy, attack: () => Promise<void>): Promise<Observed> {
  const client = start("tools/attacks/support/honest-client.ts", [proxy.url]);
  const lines = linesOf(client);
  await lines.next();
  const before = proxy.residentMib();
  const grown = { grownMib: 0, mostDescriptors: 0 };
  const watching = setInterval(() => {
    grown.grownMib = Math.max(grown.grownMib, Math.round(proxy.residentMib() - before));
    grown.mostDescriptors = Math.max(grown.mostDescriptors, proxy.descriptors());
  }, 50);
  try {
    await attack();
  } finally {
    clearInterval(watching);
    client.stdin?.end();
  }
  const { value } = await lines.next();
  return { ...(JSON.parse(String(value)) as Pick<Observed, "right" | "wrong" | "longestMs">), ...grown };
}

/** In words, for the table. */
export function observedText({ right, wrong, longestMs, grownMib, mostDescriptors }: Observed): string {
  return `honest: ${right} right, ${wrong} not, longest ${longestMs} ms; +${grownMib} MiB, ${mostDescriptors} descriptors`;
}

/** A connection of the attacker; errors are part of the attack. `text` is sent at once. */
export function attacker(
  url: string,
  text: string | Buffer = "",
  localAddress = "127.0.0.2",
): Promise<Socket> {
  const { hostname, port } = new URL(url);
  const socket = connect({ host: hostname, port: Number(port), localAddress });
  return new Promise((resolve) => {
    socket.on("error", () => resolve(socket));
    socket.once("connect", () => {
      socket.write(text);
      resolve(socket);
    });
  });
}

/** The text of a request for generated text; with `lengthBytes` its body may be longer than `body`. */
export function postText(body: string, lengthBytes = Buffer.byteLength(body)): string {
  return `POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: ${lengthBytes}\r\n\r\n${body}`;
}

/** Repeats a round of an attack until the signal aborts. */
export async function untilAborted(signal: AbortSignal, round: () => Promise<void>): Promise<void> {
  while (!signal.aborted) {
    await round().catch(() => {});
    await sleep(50, undefined, { signal }).catch(() => {});
  }
}
