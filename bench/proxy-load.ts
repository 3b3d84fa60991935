import type { ChildProcess } from "node:child_process";
import { rmSync, writeFileSync } from "node:fs";
import { dirname } from "node:path";
import { createInterface } from "node:readline";
import { compileC } from "./c-program.js";
import { startOnCore } from "./child-processes.js";

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

/** `bench/c/http-load.c`, on the given cores: a load generator in JavaScript would pause for its own garbage and take the upstream's core. */
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
    return this.run(url, clients, 0, durationMs);
  }

  /**
   * An open loop: requests are sent at a fixed rate, and each is timed from the moment when it was due. At the same rate two routers can be compared
   * by latency; a closed loop would measure their throughput again.
   */
  paced(url: string, clients: number, perSecond: number, durationMs: number): Promise<LoadResult> {
    return this.run(url, clients, perSecond, durationMs);
  }

  private async run(
    url: string,
    clients: number,
    perSecond: number,
    durationMs: number,
  ): Promise<LoadResult> {
    this.child.stdin?.write(`${new URL(url).port} ${clients} ${perSecond} ${durationMs}\n`);
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
