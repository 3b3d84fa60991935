import { type ChildProcess, spawn } from "node:child_process";
import { rmSync, writeFileSync } from "node:fs";
import { dirname } from "node:path";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { compileC, firstLine, startOnCores } from "./child-processes.js";

export interface LoadResult {
  readonly perSecond: number;
  readonly tookMs: readonly number[];
  readonly failed: number;
  /** How late the load generator itself sent a request at most, in ms. */
  readonly lateMs: number;
}

const BODY = JSON.stringify({
  model: "m",
  prompt: "a prompt of some words ".repeat(20),
  max_tokens: 16,
  stream: true,
});
const REQUEST = `POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: ${BODY.length}\r\n\r\n${BODY}`;

/**
 * `tools/bench/c/http-load.c`: a load generator in JavaScript would pause for its own garbage and
 * take the upstream's core.
 */
export class LoadGenerator {
  readonly #program: string;
  readonly #child: ChildProcess;
  readonly #lines: AsyncIterableIterator<string>;

  private constructor(program: string, cores: string) {
    const request = `${program}.request`;
    writeFileSync(request, REQUEST);
    const child = startOnCores(cores, program, [request]);
    this.#program = program;
    this.#child = child;
    this.#lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
  }

  static async start(cores: string): Promise<LoadGenerator> {
    return new LoadGenerator(await compileC("http-load"), cores);
  }

  get pid(): number {
    return this.#child.pid ?? 0;
  }

  /**
   * Without `perSecond` a closed loop: each client sends its next request when its last answer is
   * complete. With it requests are sent at that rate, and each is timed from the moment when it was
   * due: at the same rate two routers can be compared by latency.
   * @throws A request that fails.
   */
  async load(url: string, clients: number, ms: number, perSecond = 0): Promise<LoadResult> {
    const result = await this.#run(url, clients, ms, perSecond);
    if (result.failed > 0) throw new Error(`${result.failed} requests failed at ${url}`);
    return result;
  }

  async answered(url: string): Promise<void> {
    for (let attempt = 0; attempt < 240; attempt += 1) {
      if ((await this.#run(url, 1, 1, 0)).tookMs.length > 0) return;
      await sleep(250);
    }
    throw new Error(`${url} does not answer`);
  }

  async #run(url: string, clients: number, ms: number, perSecond: number): Promise<LoadResult> {
    this.#child.stdin?.write(`${new URL(url).port} ${clients} ${perSecond} ${ms}\n`);
    const { value, done } = await this.#lines.next();
    if (done === true) throw new Error("the load generator ended");
    const [elapsedUs = 0, failed = 0, lateUs = 0, ...tookUs] = value.split(" ").map(Number);
    return {
      perSecond: (tookUs.length * 1e6) / elapsedUs,
      tookMs: tookUs.map((us) => us / 1000),
      failed,
      lateMs: lateUs / 1000,
    };
  }

  stop(): void {
    this.#child.kill("SIGKILL");
    rmSync(dirname(this.#program), { recursive: true });
  }
}

export const [ROUTER_CORE, OTHER_CORE] = ["0", "1"];

export interface Target {
  readonly url: string;
  readonly pid: number;
}

export interface Bench {
  readonly generator: LoadGenerator;
  /** The program of fast-upstream.ts, and its P and D as `127.0.0.1:PORT`. */
  readonly upstream: ChildProcess;
  readonly prefill: string;
  readonly decode: string;
  /**
   * Flags of kv-proxy and kv-epp: pairing, KV events, token ids and the disaggregation rule are on;
   * the prompt is long enough for two legs.
   */
  readonly flags: readonly string[];
  /** Starts a process that is ended after the benchmark. */
  readonly start: typeof startOnCores;
  /** Starts a program of ours, and waits until it is ready. */
  startOurs(cores: string, node: string, args: readonly string[]): Promise<Target>;
}

/** Runs a benchmark with the load generator and the upstreams on the other cores. */
export async function besideRouter<T>(
  otherCores: string,
  run: (bench: Bench) => Promise<T>,
): Promise<T> {
  const children: ChildProcess[] = [];
  const start: typeof startOnCores = (...args) => {
    const child = startOnCores(...args);
    children.push(child);
    return child;
  };
  spawn("taskset", ["-a", "-p", "-c", otherCores, String(process.pid)], { stdio: "ignore" });
  const generator = await LoadGenerator.start(otherCores);
  try {
    const script = fileURLToPath(new URL("./fast-upstream.ts", import.meta.url));
    const upstream = start(otherCores, process.execPath, ["--import", "tsx", script, otherCores]);
    const ports = JSON.parse(await firstLine(upstream)) as Record<string, number>;
    const [prefill, decode] = [`127.0.0.1:${ports["prefill"]}`, `127.0.0.1:${ports["decode"]}`];
    const options = {
      "--prefill": prefill,
      "--decode": decode,
      "--port": 0,
      "--log-level": "error",
      "--prefill-side-channel-port": ports["sideChannel"],
      "--decode-side-channel-port": ports["sideChannel"],
      "--prefill-routing": "prefix-aware",
      "--decode-routing": "prefix-aware",
      "--disaggregate-above": 0,
    };
    return await run({
      generator,
      upstream,
      prefill,
      decode,
      flags: Object.entries(options).flat().map(String),
      start,
      async startOurs(cores, node, args) {
        const child = start(cores, "env", ["NODE_ENV=production", node, ...args]);
        const [, address = ""] = /ready (\S+)/.exec(await firstLine(child)) ?? [];
        const url = address.startsWith("http") ? address : `http://${address}`;
        return { url, pid: child.pid ?? 0 };
      },
    });
  } finally {
    generator.stop();
    for (const child of children) child.kill("SIGKILL");
  }
}
