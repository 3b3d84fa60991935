// Whether one client or publisher at full size delays others: `/health` and small requests beside each, against the idle proxy of the same run.
import { type ChildProcess, spawn } from "node:child_process";
import { once } from "node:events";
import { Agent, request as httpRequest } from "node:http";
import { type AddressInfo, createServer } from "node:net";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { encodeMsgpack } from "@kv/protocol";
import { alone, percentile, type Row } from "./report.js";

const PHASE_MS = 5000;
/** Of the p99 of the idle proxy. */
const MOST_TIMES = 5;
const MOST_TURN_MS = 50;
const script = (name: string) => fileURLToPath(new URL(name, import.meta.url));
const SMALL = JSON.stringify({ model: "m", prompt: "a few words", max_tokens: 4, stream: true });

/** Something that one party does at full size until the signal aborts. */
type Attack = (url: string, publisher: Publisher, signal: AbortSignal) => Promise<void>;

const ATTACKS: Readonly<Record<string, Attack>> = {
  "KV events of 100,000 blocks, and their end": async (_url, publisher, signal) => {
    publisher.pour(signal);
    await once(signal, "abort");
  },
  "bodies of 225 KB with n: 256": async (url, _publisher, signal) => {
    const body = JSON.stringify({ model: "m", prompt: "x".repeat(225_000), n: 256, max_tokens: 1 });
    while (!signal.aborted) await send(url, body, signal).catch(() => sleep(10));
  },
  "bodies of 2,000,000 token ids": async (url, _publisher, signal) => {
    const body = JSON.stringify({ model: "m", prompt: Array(2_000_000).fill(7), max_tokens: 1 });
    while (!signal.aborted) await send(url, body, signal).catch(() => sleep(10));
  },
  "8 clients that leave after 10 ms": async (url, _publisher, signal) => {
    const leave = async () => {
      while (!signal.aborted) {
        const leaving = AbortSignal.timeout(10);
        await send(url, SMALL, leaving).catch(() => {});
        await sleep(10);
      }
    };
    await Promise.all(Array.from({ length: 8 }, leave));
  },
};

export async function fairness(only: readonly string[] | undefined): Promise<readonly Row[]> {
  const upstream = start("./proxy-upstream.ts");
  const { prefill, decode } = JSON.parse(await nextLine(upstream)) as { prefill: number; decode: number };
  const publisher = await startPublisher();
  const urls = [prefill, decode].map((port) => `http://127.0.0.1:${port}`);
  const proxy = start("./fairness-proxy.ts", ...urls, publisher.endpoint);
  const url = await nextLine(proxy);
  const turns: number[] = [];
  void (async () => {
    for (;;) turns.push(Number(await nextLine(proxy)));
  })().catch(() => {});
  const rows: Row[] = [];
  try {
    await measure(url, 2000);
    for (const [name, attack] of Object.entries(ATTACKS)) {
      if (only !== undefined && !only.some((part) => name.includes(part))) continue;
      const idle = await measure(url, PHASE_MS);
      const stop = new AbortController();
      const running = attack(url, publisher, stop.signal);
      await sleep(500);
      turns.length = 0;
      const busy = await measure(url, PHASE_MS);
      const longest = Math.max(...turns);
      stop.abort();
      await running;
      for (const what of ["/health", "small requests"] as const)
        rows.push(rowOf(`${what} beside ${name}: p99`, busy[what], idle[what]));
      const [what, took] = [`longest turn beside ${name}`, `${longest.toFixed(1)} ms`];
      rows.push(alone(what, took, `<= ${MOST_TURN_MS} ms`, longest <= MOST_TURN_MS));
      await sleep(1000);
    }
  } finally {
    publisher.close();
    for (const child of [proxy, upstream]) child.process.kill("SIGKILL");
  }
  return rows;
}

interface Measured {
  readonly "/health": readonly number[];
  readonly "small requests": readonly number[];
}

/** Asks in turn for so long. Returns the times, in ms. */
async function measure(url: string, forMs: number): Promise<Measured> {
  const times: Record<keyof Measured, number[]> = { "/health": [], "small requests": [] };
  const timed = async (what: keyof Measured, body?: string) => {
    const startedAt = performance.now();
    await send(url, body);
    times[what].push(performance.now() - startedAt);
  };
  for (const endAt = performance.now() + forMs; performance.now() < endAt; await sleep(2)) {
    await timed("/health");
    await timed("small requests", SMALL);
  }
  return times;
}

function rowOf(what: string, busy: readonly number[], idle: readonly number[]): Row {
  const [ours, theirs] = [percentile(busy, 0.99), percentile(idle, 0.99)];
  const show = (ms: number, of: readonly number[]) => `${ms.toFixed(2)} ms of ${of.length}`;
  const ratio = ours / theirs;
  return {
    ...{ what, ours: show(ours, busy), theirs: `idle ${show(theirs, idle)}`, ratio },
    ...{ wanted: `<= ${MOST_TIMES}`, met: ratio <= MOST_TIMES },
  };
}

const agent = new Agent({ keepAlive: true });

/** Gets `/health`, or posts a completion. Resolves at the end of the answer. */
function send(url: string, body?: string, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const path = body === undefined ? "/health" : "/v1/completions";
    const options = { agent, method: body === undefined ? "GET" : "POST", signal };
    const headers = { "content-type": "application/json" };
    const sent = httpRequest(url + path, { ...options, headers }, (answer) => {
      answer.resume().once("end", resolve).once("error", reject);
    });
    sent.once("error", reject).end(body);
  });
}

interface Publisher {
  readonly endpoint: string;
  pour(signal: AbortSignal): void;
  close(): void;
}

/** A PUB that sends valid batches as fast as they are read: 100,000 blocks, then that all are gone. */
async function startPublisher(): Promise<Publisher> {
  const blocks = {
    ...{ type: "BlockStored", parent_block_hash: null, block_size: 16, medium: "GPU" },
    block_hashes: Array.from({ length: 100_000 }, (_, at) => 1000 + at),
    token_ids: Array.from({ length: 1_600_000 }, (_, at) => at % 150_000),
  };
  const [stored, cleared] = [blocks, { type: "AllBlocksCleared" }].map((event) =>
    encodeMsgpack([1.5, [event], 0]),
  ) as [Uint8Array, Uint8Array];
  const greeting = Buffer.from(`ff00000000000000017f03014e554c4c${"00".repeat(48)}`, "hex");
  const ready = Buffer.from("04190552454144590b536f636b65742d5479706500000003505542", "hex");
  let sequence = 0n;
  let pouring: AbortSignal | undefined;
  let pour = () => {};
  const server = createServer((socket) => {
    socket.on("error", () => {}).resume();
    socket.write(Buffer.concat([greeting, ready]));
    pour = () => {
      while (pouring?.aborted === false) {
        const payload = sequence % 2n === 0n ? stored : cleared;
        const head = Buffer.alloc(21);
        head.set([1, 0, 1, 8]);
        head.writeBigUInt64BE(sequence++, 4);
        head.set([2], 12);
        head.writeBigUInt64BE(BigInt(payload.byteLength), 13);
        socket.write(head);
        if (!socket.write(payload)) return;
      }
    };
    socket.on("drain", pour);
  }).listen(0, "127.0.0.1");
  await once(server, "listening");
  return {
    endpoint: `tcp://127.0.0.1:${(server.address() as AddressInfo).port}`,
    pour(signal) {
      pouring = signal;
      pour();
    },
    close: () => server.close(),
  };
}

interface Child {
  readonly process: ChildProcess;
  readonly lines: AsyncIterator<string>;
}

function start(name: string, ...args: readonly string[]): Child {
  const child = spawn(process.execPath, ["--import", "tsx", script(name), ...args], {
    stdio: ["pipe", "pipe", "inherit"],
  });
  return { process: child, lines: createInterface({ input: child.stdout })[Symbol.asyncIterator]() };
}

async function nextLine({ lines }: Child): Promise<string> {
  const { value, done } = await lines.next();
  if (done === true) throw new Error("a process of the benchmark has ended");
  return value;
}
