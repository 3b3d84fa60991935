import { type ChildProcess, spawn } from "node:child_process";
import { readdirSync, readFileSync } from "node:fs";
import { request } from "node:http";
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
  if (child.stdout === null) throw new Error("the process has no stdout");
  for await (const line of createInterface({ input: child.stdout })) return line;
  throw new Error("a process ended before it was ready");
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

/** Runs an attack while another client, at another address, sends a request every 20 ms. */
export async function observe(proxy: AttackedProxy, attack: () => Promise<void>): Promise<Observed> {
  for (let at = 0; at < 20; at += 1) await honest(proxy.url);
  const before = proxy.residentMib();
  const seen = { right: 0, wrong: 0, longestMs: 0, grownMib: 0, mostDescriptors: 0 };
  let running = true;
  const watching = (async () => {
    while (running) {
      const startedAt = performance.now();
      if (await honest(proxy.url)) seen.right += 1;
      else seen.wrong += 1;
      seen.longestMs = Math.max(seen.longestMs, Math.round(performance.now() - startedAt));
      seen.grownMib = Math.max(seen.grownMib, Math.round(proxy.residentMib() - before));
      seen.mostDescriptors = Math.max(seen.mostDescriptors, proxy.descriptors());
      await sleep(20);
    }
  })();
  await attack().finally(() => {
    running = false;
  });
  await watching;
  return seen;
}

/** In words, for the table. */
export function observedText({ right, wrong, longestMs, grownMib, mostDescriptors }: Observed): string {
  return `honest: ${right} right, ${wrong} not, longest ${longestMs} ms; +${grownMib} MiB, ${mostDescriptors} descriptors`;
}

/** Whether an honest request is answered rightly. */
function honest(url: string): Promise<boolean> {
  return new Promise((resolve) => {
    const asked = request(`${url}/v1/completions`, {
      method: "POST",
      agent: false,
      localAddress: "127.0.0.9",
      headers: { "content-type": "application/json" },
      timeout: 60_000,
    });
    asked.on("error", () => resolve(false)).on("timeout", () => asked.destroy());
    asked.on("response", (response) => {
      let text = "";
      response.setEncoding("utf8").on("data", (chunk: string) => {
        text += chunk;
      });
      response.on("end", () => resolve(response.statusCode === 200 && text.includes("right")));
      response.on("error", () => resolve(false));
    });
    asked.end('{"prompt":"honest","max_tokens":1}');
  });
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
