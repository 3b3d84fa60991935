import { type ChildProcess, spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { stripVTControlCharacters } from "node:util";
import { freePort } from "@kv/testing/http/listening";
import { compileC, cpuMs, residentBytes, startOnCores } from "../child-processes.js";
import { CONTESTANTS } from "./contestants.js";
import type { Engines } from "./engines.js";

/** Load generator, engines and this process share the other core. */
const ROUTER_CORE = "0";
export const OTHER_CORE = "1";
const READY_MS = 90_000;
/** Of what a program wrote. */
const KEPT_LENGTH = 200;

export type Arena = Awaited<ReturnType<typeof openArena>>;
export type Router = Awaited<ReturnType<Arena["start"]>>;

export interface Load {
  readonly clients: number;
  readonly ms: number;
  /** Of all clients; 0: each sends its next request when its last answer is complete. */
  readonly perSecond?: number;
  readonly body?: string;
}

export const bodyOf = (lengthBytes: number, more: object = {}) =>
  JSON.stringify({
    model: "m",
    prompt: "a few words of a prompt ".repeat(Math.ceil(lengthBytes / 24)).slice(0, lengthBytes),
    max_tokens: 16,
    stream: true,
    ...more,
  });

const SMALL = bodyOf(900);

/** In JavaScript it would pause for its own garbage, and take the engines' core. */
async function startGenerator() {
  const program = await compileC("http-load");
  const folder = mkdtempSync(join(tmpdir(), "kv-bench-"));
  const child = startOnCores(OTHER_CORE, program, []);
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
  const files = new Map<string, string>();

  const fileOf = (body: string) => {
    const file = files.get(body) ?? join(folder, `${files.size}`);
    if (!files.has(body))
      writeFileSync(
        file,
        `POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: ${Buffer.byteLength(body)}\r\n\r\n${body}`,
      );
    files.set(body, file);
    return file;
  };
  return {
    async load(url: string, { clients, ms, perSecond = 0, body = SMALL }: Load) {
      child.stdin.write(`${new URL(url).port} ${clients} ${perSecond} ${ms} ${fileOf(body)}\n`);
      const { value, done } = await lines.next();
      if (done === true) throw new Error("the load generator ended");
      const [elapsedUs = 0, failed = 0, , ...tookUs] = value.split(" ").map(Number);
      return {
        perSecond: (tookUs.length * 1e6) / elapsedUs,
        tookMs: tookUs.map((us) => us / 1000),
        failed,
      };
    },
    stop() {
      child.kill("SIGKILL");
      for (const each of [folder, dirname(program)]) rmSync(each, { recursive: true });
    },
  };
}

async function answers(url: string, body?: string): Promise<boolean> {
  const asked = body === undefined ? {} : { method: "POST", body };
  const headers = { "content-type": "application/json" };
  const answer = await fetch(url, { ...asked, headers, signal: AbortSignal.timeout(5_000) }).catch(
    () => undefined,
  );
  await answer?.arrayBuffer().catch(() => {});
  return answer?.status === 200;
}

export async function openArena() {
  spawn("taskset", ["-a", "-p", "-c", OTHER_CORE, String(process.pid)], { stdio: "ignore" });
  const generator = await startGenerator();

  /**
   * Starts a router, and waits until its health route and then one request are answered.
   * @throws An Error with what it wrote last.
   */
  async function start(name: string, engines: Engines) {
    const contestant = CONTESTANTS[name];
    if (contestant === undefined)
      throw new Error(`no router ${name}; there are ${Object.keys(CONTESTANTS).join(", ")}`);
    const { programs, ready = "/health", cores = 1 } = contestant;
    const port = await freePort();
    const url = `http://127.0.0.1:${port}`;
    const all = await programs(engines, port);
    const startedMs = performance.now();
    let [said, ended] = ["", false];
    const children: ChildProcess[] = [];
    const measured: number[] = [];
    for (const { command, args, isEngine = false } of all) {
      const on = isEngine ? OTHER_CORE : cores === 1 ? ROUTER_CORE : `${ROUTER_CORE},${OTHER_CORE}`;
      const child = spawn("taskset", ["-c", on, command, ...args], {
        stdio: ["pipe", "pipe", "pipe"],
      });
      for (const stream of [child.stdout, child.stderr])
        stream.on("data", (chunk) => {
          said = `${said}${stripVTControlCharacters(String(chunk))}`.slice(-KEPT_LENGTH);
        });
      child.on("exit", () => {
        ended = true;
      });
      children.push(child);
      if (!isEngine && child.pid !== undefined) measured.push(child.pid);
    }
    const stop = async () => {
      const running = children.filter(
        ({ exitCode, signalCode }) => (exitCode ?? signalCode) === null,
      );
      const exits = running.map((child) => once(child, "exit"));
      for (const child of running) child.kill("SIGKILL");
      await Promise.all(exits);
    };
    for (const [route, body] of [[ready], ["/v1/completions", engines.request ?? SMALL]] as const)
      while (!(await answers(`${url}${route}`, body))) {
        if (!ended && performance.now() - startedMs < READY_MS) {
          await sleep(10);
          continue;
        }
        const why = ended ? "ended" : `does not answer ${route}`;
        await stop();
        throw new Error(`${name} ${why}: ${said.trim()}`);
      }
    return {
      url,
      readyMs: performance.now() - startedMs,
      /** With ports left out: they differ in each run. */
      commands: all
        .filter(({ isEngine }) => isEngine !== true)
        .map(({ command, args }) => [command, ...args].join(" ").replace(/:\d{4,5}\b/g, ":PORT")),
      cpuMs: () => measured.reduce((sum, pid) => sum + cpuMs(pid), 0),
      residentBytes: () => measured.reduce((sum, pid) => sum + residentBytes(pid), 0),
      [Symbol.asyncDispose]: stop,
    };
  }

  return {
    load: generator.load,
    start,
    async [Symbol.asyncDispose]() {
      generator.stop();
    },
  };
}
