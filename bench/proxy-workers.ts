import { type ChildProcess, spawn } from "node:child_process";
import { readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname } from "node:path";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { compileC } from "./c-program.js";
import { pairRatio, type Row, spread } from "./report.js";

const ROUNDS = 5;
const WINDOW_MS = 3_000;
/** Each worker compiles its code for itself. */
const WARM_MS_PER_WORKER = 6_000;
const CONNECTIONS = 64;
const CORES = "0,1";
const CLI = fileURLToPath(new URL("../packages/proxy/dist/cli.js", import.meta.url));

const EVENTS = Array.from(
  { length: 16 },
  (_, at) =>
    `data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":" ${at}","finish_reason":${at < 15 ? "null" : '"length"'}}]}\n\n`,
).join("");
const STREAM = `${EVENTS}data: [DONE]\n\n`;
const PREFILLED = JSON.stringify({
  id: "c",
  choices: [{ index: 0, text: "x", finish_reason: "length" }],
  usage: { prompt_tokens: 160, completion_tokens: 1 },
  kv_transfer_params: {
    do_remote_prefill: true,
    do_remote_decode: false,
    remote_block_ids: [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]],
    remote_engine_id: "e",
    remote_request_id: "r",
    remote_host: "127.0.0.1",
    remote_port: 5600,
    tp_size: 1,
  },
});
const head = (type: string) =>
  `HTTP/1.1 200 OK\r\ncontent-type: ${type}\r\ntransfer-encoding: chunked\r\n\r\n`;
const chunk = (text: string) => `${Buffer.byteLength(text).toString(16)}\r\n${text}\r\n0\r\n\r\n`;
const ANSWERS = {
  prefill: Buffer.from(head("application/json") + chunk(PREFILLED)),
  decode: Buffer.from(head("text/event-stream") + chunk(STREAM)),
};
const BODY = JSON.stringify({
  model: "m",
  prompt: "a prompt of some words ".repeat(20),
  max_tokens: 16,
  stream: true,
});
const REQUEST = Buffer.from(
  `POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: ${BODY.length}\r\n\r\n${BODY}`,
);

/**
 * One worker and two on the same two cores, with the load generator and the servers on them too. These are in C, with answers made before: what they take
 * of the cores is not there for the proxy.
 */
export async function proxyWorkers(): Promise<readonly Row[]> {
  spawn("taskset", ["-a", "-p", "-c", CORES, String(process.pid)], { stdio: "ignore" });
  const answers = await Helper.start("http-answers", ["2"]);
  for (const [listener, answer] of [ANSWERS.prefill, ANSWERS.decode].entries())
    answers.write(`answer ${listener} /v1/completions ${answer.length}\n`, answer);
  answers.write("listen\n");
  const [p = 0, d = 0] = (await answers.line()).split(" ").map(Number);
  const generator = await Helper.start("http-load", [], REQUEST);
  const helpersMs = () => cpuMs(answers.pid) + cpuMs(generator.pid);
  const load = async (port: number, durationMs: number) => {
    generator.write(`${port} ${CONNECTIONS} 0 ${durationMs}\n`);
    const [, failed, , ...took] = (await generator.line()).split(" ");
    if (failed !== "0") throw new Error(`${failed} requests failed`);
    return took.length;
  };
  const [one, two] = [await start(1, p, d), await start(2, p, d)];
  try {
    const rates: [number[], number[]] = [[], []];
    const cpu: [number[], number[]] = [[], []];
    const share: [number[], number[]] = [[], []];
    for (const { port, warmMs } of [one, two]) await load(port, warmMs);
    for (let round = 0; round < ROUNDS; round += 1) {
      for (const at of round % 2 === 0 ? ([0, 1] as const) : ([1, 0] as const)) {
        const target = at === 0 ? one : two;
        const [beforeMs, ownMs] = [cpuMs(target.pid), helpersMs()];
        const count = await load(target.port, WINDOW_MS);
        rates[at].push((count * 1000) / WINDOW_MS);
        cpu[at].push((cpuMs(target.pid) - beforeMs) / count);
        share[at].push((helpersMs() - ownMs) / count);
      }
    }
    const ratio = pairRatio(rates[1], rates[0]);
    return [
      {
        what: `requests per second, ${CONNECTIONS} clients, on the same two cores: 2 workers / 1 worker`,
        ours: spread(rates[1], "/s"),
        theirs: spread(rates[0], "/s"),
        ratio,
        wanted: ">= 1.5",
        met: ratio >= 1.5,
      },
      {
        what: "processor time of all processes of the proxy per request: 2 workers / 1 worker",
        ours: spread(cpu[1], "ms"),
        theirs: spread(cpu[0], "ms"),
        ratio: pairRatio(cpu[1], cpu[0]),
        wanted: "reported",
        met: undefined,
      },
      {
        what: "processor time of load generator and servers per request",
        ours: spread(share[1], "ms"),
        theirs: spread(share[0], "ms"),
        ratio: undefined,
        wanted: "reported",
        met: undefined,
      },
    ];
  } finally {
    for (const { child } of [one, two]) child.kill("SIGTERM");
    for (const helper of [answers, generator]) helper.stop();
    await sleep(500);
  }
}

/** A program of bench/c on the two cores, which takes commands on stdin and answers in lines. */
class Helper {
  readonly #child: ChildProcess;
  readonly #lines: AsyncIterator<string>;

  private constructor(
    readonly program: string,
    flags: readonly string[],
  ) {
    this.#child = spawn("taskset", ["-c", CORES, program, ...flags], { stdio: ["pipe", "pipe", "inherit"] });
    const { stdout } = this.#child;
    if (stdout === null) throw new Error("no pipe");
    this.#lines = createInterface({ input: stdout })[Symbol.asyncIterator]();
  }

  /** `file`: what its first argument names. */
  static async start(name: string, flags: readonly string[], file?: Buffer): Promise<Helper> {
    const program = await compileC(name);
    if (file === undefined) return new Helper(program, flags);
    writeFileSync(`${program}.request`, file);
    return new Helper(program, [`${program}.request`, ...flags]);
  }

  get pid(): number {
    return this.#child.pid ?? 0;
  }

  write(...texts: readonly (string | Buffer)[]): void {
    for (const text of texts) this.#child.stdin?.write(text);
  }

  async line(): Promise<string> {
    const { value, done } = await this.#lines.next();
    if (done === true) throw new Error(`${this.program} has ended`);
    return value;
  }

  stop(): void {
    this.#child.kill("SIGKILL");
    rmSync(dirname(this.program), { recursive: true });
  }
}

interface Target {
  readonly child: ChildProcess;
  readonly pid: number;
  readonly port: number;
  readonly warmMs: number;
}

async function start(workers: number, prefill: number, decode: number): Promise<Target> {
  const flags = [
    ...["--prefill", `127.0.0.1:${prefill}`, "--decode", `127.0.0.1:${decode}`, "--port", "0"],
    ...["--prefill-routing", "prefix-aware", "--decode-routing", "prefix-aware", "--disaggregate-above", "0"],
    ...["--pairing", "off", "--workers", String(workers)],
  ];
  const child = spawn("taskset", ["-c", CORES, process.execPath, CLI, ...flags], {
    // The log is written, as by default.
    stdio: ["ignore", "pipe", "ignore"],
    env: { ...process.env, NODE_ENV: "production" },
  });
  for await (const line of createInterface({ input: child.stdout })) {
    const port = Number(/ready http:\/\/[^:]+:(\d+)/.exec(line)?.[1]);
    return { child, pid: child.pid ?? 0, port, warmMs: workers * WARM_MS_PER_WORKER };
  }
  throw new Error("kv-proxy ended before it was ready");
}

/** Processor time of a process and its children, in ms. */
function cpuMs(pid: number): number {
  const fields = readFileSync(`/proc/${pid}/stat`, "utf8").split(") ")[1]?.split(" ") ?? [];
  const own = (Number(fields[11]) + Number(fields[12])) * 10;
  const children = readdirSync(`/proc/${pid}/task`).flatMap((task) =>
    readFileSync(`/proc/${pid}/task/${task}/children`, "utf8").trim().split(/\s+/).filter(Boolean),
  );
  return children.reduce((sum, child) => sum + cpuMs(Number(child)), own);
}
