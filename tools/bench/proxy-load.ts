import { type ChildProcess, spawn } from "node:child_process";
import { rmSync, writeFileSync } from "node:fs";
import { dirname } from "node:path";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { compileC } from "./c-program.js";
import { firstLine, startOnCore } from "./child-processes.js";

export interface LoadResult {
  readonly perSecond: number;
  /** The duration of each complete request, in ms. */
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
 * `tools/bench/c/http-load.c`, on the given cores: a load generator in JavaScript would pause for
 * its own garbage and take the upstream's core.
 */
export class LoadGenerator {
  private readonly child: ChildProcess;
  private readonly lines: AsyncIterableIterator<string>;

  private constructor(
    private readonly program: string,
    cores: string,
  ) {
    const request = `${program}.request`;
    writeFileSync(request, REQUEST);
    this.child = startOnCore(cores, program, [request]);
    const input = this.child.stdout as NonNullable<ChildProcess["stdout"]>;
    this.lines = createInterface({ input })[Symbol.asyncIterator]();
  }

  static async start(cores: string): Promise<LoadGenerator> {
    return new LoadGenerator(await compileC("http-load"), cores);
  }

  get pid(): number {
    return this.child.pid ?? 0;
  }

  /** A closed loop: each client sends its next request when its last answer is complete. */
  busy(url: string, clients: number, durationMs: number): Promise<LoadResult> {
    return this.complete(url, clients, 0, durationMs);
  }

  /**
   * An open loop: requests are sent at a fixed rate, and each is timed from the moment when it was
   * due. At the same rate two routers can be compared by latency; a closed loop would measure their
   * throughput again.
   */
  paced(url: string, clients: number, perSecond: number, durationMs: number): Promise<LoadResult> {
    return this.complete(url, clients, perSecond, durationMs);
  }

  /** Waits until a request is answered. */
  async answered(url: string): Promise<void> {
    for (let attempt = 0; attempt < 240; attempt += 1) {
      if ((await this.run(url, 1, 0, 1)).tookMs.length > 0) return;
      await sleep(250);
    }
    throw new Error(`${url} does not answer`);
  }

  private async complete(url: string, ...load: [number, number, number]): Promise<LoadResult> {
    const result = await this.run(url, ...load);
    if (result.failed > 0) throw new Error(`${result.failed} requests failed at ${url}`);
    return result;
  }

  private async run(url: string, ...load: [number, number, number]): Promise<LoadResult> {
    this.child.stdin?.write(`${[new URL(url).port, ...load].join(" ")}\n`);
    const { value, done } = await this.lines.next();
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
    this.child.kill("SIGKILL");
    rmSync(dirname(this.program), { recursive: true });
  }
}

/** The router's core, and that of all others. */
export const [ROUTER_CORE, OTHER_CORE] = ["0", "1"];

/** What shares a core beside a router under load. */
export interface Bench {
  readonly generator: LoadGenerator;
  /** The program of fast-upstream.ts: P at `prefill` and D at `decode`, as `127.0.0.1:PORT`. */
  readonly upstream: ChildProcess;
  readonly prefill: string;
  readonly decode: string;
  /**
   * Flags of kv-proxy and kv-epp: pairing, KV events, token ids and the disaggregation rule are on;
   * the prompt is long enough for two legs.
   */
  readonly flags: readonly string[];
  /** Starts a process that is ended after the benchmark. */
  readonly start: typeof startOnCore;
}

/** Runs a benchmark with the load generator and the upstreams on one core. */
export async function besideRouter<T>(run: (bench: Bench) => Promise<T>): Promise<T> {
  const children: ChildProcess[] = [];
  const start: typeof startOnCore = (...args) => {
    const child = startOnCore(...args);
    children.push(child);
    return child;
  };
  spawn("taskset", ["-a", "-p", "-c", OTHER_CORE, String(process.pid)], { stdio: "ignore" });
  const generator = await LoadGenerator.start(OTHER_CORE);
  try {
    const script = fileURLToPath(new URL("./fast-upstream.ts", import.meta.url));
    const upstream = start(OTHER_CORE, process.execPath, ["--import", "tsx", script, OTHER_CORE]);
    const ports = JSON.parse(await firstLine(upstream)) as Record<
      "prefill" | "decode" | "sideChannel",
      number
    >;
    const [prefill, decode] = [`127.0.0.1:${ports.prefill}`, `127.0.0.1:${ports.decode}`];
    const side = String(ports.sideChannel);
    const flags = [
      "--prefill",
      prefill,
      "--decode",
      decode,
      "--port",
      "0",
      "--log-level",
      "error",
      "--prefill-side-channel-port",
      side,
      "--decode-side-channel-port",
      side,
      "--prefill-routing",
      "prefix-aware",
      "--decode-routing",
      "prefix-aware",
      "--disaggregate-above",
      "0",
    ];
    return await run({ generator, upstream, prefill, decode, flags, start });
  } finally {
    generator.stop();
    for (const child of children) child.kill("SIGKILL");
  }
}
