import type { LogFields } from "@kv/interface";
import { postText, type RawClient, rawClient } from "@kv/testing/http/raw-client";
import { afterEach, describe, expect, it } from "vitest";
import type { HeadlessPrefill } from "../src/headless/headless-prefill.js";
import {
  PREFILL_LIMITS,
  type PrefillLimits,
  PrefillServer,
} from "../src/headless/prefill-server.js";
import { serveSample } from "./served.js";

const closing: (() => unknown)[] = [];
afterEach(async () => {
  for (const close of closing.splice(0).reverse()) await close();
});

interface Running {
  readonly url: string;
  /** Lets the prompts be answered. */
  readonly release: () => void;
  /** Prompts that have come. */
  readonly asked: () => number;
  open(text?: string, from?: string): Promise<RawClient>;
}

/** A server whose prompts are answered when the test says so. */
async function serveWith(limits: Partial<PrefillLimits>): Promise<Running> {
  let asked = 0;
  let release = () => {};
  const released = new Promise<void>((resolve) => {
    release = resolve;
  });
  const prefill = {
    blocks: { total: 2, used: 0 },
    blockSize: 16,
    prefill: async () => {
      asked += 1;
      return released.then(() => ({}));
    },
  } as unknown as HeadlessPrefill;
  const server = new PrefillServer({ prefill, model: "m", vllmVersion: "0", limits });
  const url = await server.listen({ host: "127.0.0.1", port: 0 });
  closing.push(() => server.close(), release);
  const open = async (text?: string, from?: string) => {
    const client = await rawClient(url, text, from);
    closing.push(() => client.socket.destroy());
    return client;
  };
  return { url, release, asked: () => asked, open };
}

const GET = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n";
const PROMPT = JSON.stringify({ prompt: [1, 2], kv_transfer_params: { do_remote_decode: true } });
const OTHER = "127.0.0.2";

/** Another client is served. */
async function expectServed({ open }: Running, from?: string): Promise<void> {
  const client = await open(GET, from);
  await expect.poll(client.received).toMatch(/^HTTP\/1\.1 200 /);
  client.socket.destroy();
}

/** What a client gets until its connection ends. */
async function untilClosed({ open }: Running, text: string): Promise<string> {
  return (await open(text)).closed;
}

/** The head of the answer to a client. */
async function answerTo(client: RawClient): Promise<string> {
  await expect.poll(client.received).toContain("\r\n\r\n");
  return client.received();
}

/** Opens a connection whose prompt is not answered yet. */
async function openBusy(running: Running): Promise<RawClient> {
  const before = running.asked();
  const client = await running.open(postText(PROMPT));
  await expect.poll(running.asked).toBe(before + 1);
  return client;
}

/** The begin of a chunked body of spaces. */
const chunked = (bytes: number) =>
  postText(`${bytes.toString(16)}\r\n${" ".repeat(bytes)}\r\n`, "transfer-encoding: chunked\r\n");

/** What happens at each limit. */
const tries: Readonly<Record<keyof PrefillLimits, () => Promise<void>>> = {
  async maxConnections() {
    const running = await serveWith({ maxConnections: 2 });
    const [held] = [await openBusy(running), await openBusy(running)];
    expect(await untilClosed(running, "")).toMatch(/^HTTP\/1\.1 503 [\s\S]*retry-after/);
    held?.socket.destroy();
    await expect
      .poll(async () => (await fetch(running.url).catch(() => undefined))?.status)
      .toBe(404);
  },
  async maxConnectionsPerAddress() {
    const running = await serveWith({ maxConnectionsPerAddress: 1 });
    await openBusy(running);
    expect(await untilClosed(running, "")).toMatch(/^HTTP\/1\.1 503 /);
    await expectServed(running, OTHER);
  },
  async maxRequests() {
    const running = await serveWith({ maxRequests: 2 });
    const [held] = [await openBusy(running), await openBusy(running)];
    expect(await answerTo(await running.open(GET))).toMatch(/^HTTP\/1\.1 503 [\s\S]*retry-after/);
    held?.socket.destroy();
    await expect
      .poll(async () => (await fetch(running.url).catch(() => undefined))?.status)
      .toBe(404);
  },
  async maxRequestsPerAddress() {
    const running = await serveWith({ maxRequestsPerAddress: 1 });
    const held = await openBusy(running);
    expect(await answerTo(await running.open(GET))).toMatch(/^HTTP\/1\.1 503 /);
    await expectServed(running, OTHER);
    running.release();
    await expect.poll(held.received).toMatch(/^HTTP\/1\.1 200 /);
    await expectServed(running);
  },
  async maxHeaderBytes() {
    const running = await serveWith({ maxHeaderBytes: 2048 });
    expect(await untilClosed(running, postText("", `x-long: ${"x".repeat(4096)}\r\n`))).toMatch(
      /^HTTP\/1\.1 431 /,
    );
    await expectServed(running);
  },
  async headerTimeoutMs() {
    const running = await serveWith({ headerTimeoutMs: 50, requestTimeoutMs: 100 });
    expect(await untilClosed(running, "GET /health HTTP/1.1\r\nx-slow: ")).toMatch(
      /^HTTP\/1\.1 408 /,
    );
    await expectServed(running);
  },
  async requestTimeoutMs() {
    const running = await serveWith({ headerTimeoutMs: 50, requestTimeoutMs: 100 });
    expect(await untilClosed(running, chunked(10))).toMatch(/^HTTP\/1\.1 408 /);
    await expectServed(running);
  },
  async idleTimeoutMs() {
    const running = await serveWith({ idleTimeoutMs: 50 });
    expect(await untilClosed(running, GET)).toMatch(/^HTTP\/1\.1 200 /);
  },
  async maxBodyBytes() {
    const running = await serveWith({ maxBodyBytes: 1000 });
    expect(await answerTo(await running.open(chunked(1001)))).toMatch(/^HTTP\/1\.1 413 /);
    await expectServed(running);
  },
  async maxBodiesBytes() {
    const running = await serveWith({ maxBodiesBytes: 100_000, maxBodyBytes: 100_000 });
    const bodies = [
      await running.open(chunked(90_000)),
      await running.open(chunked(80_000), OTHER),
    ];
    // The largest body that is still arriving makes room; the first 16 KiB of each do not count.
    expect(await Promise.race(bodies.map(answerTo))).toMatch(/^HTTP\/1\.1 503 [\s\S]*retry-after/);
    await expectServed(running);
    for (const { socket } of bodies) socket.destroy();
    running.release();
    await expect
      .poll(async () => (await post(running, PROMPT + " ".repeat(90_000))).status)
      .toBe(200);
  },
  async maxBodiesBytesPerAddress() {
    const running = await serveWith({ maxBodiesBytesPerAddress: 100_000, maxBodyBytes: 100_000 });
    const bodies = [await running.open(chunked(90_000)), await running.open(chunked(80_000))];
    expect(await Promise.race(bodies.map(answerTo))).toMatch(/^HTTP\/1\.1 503 /);
    const other = await running.open(chunked(80_000), OTHER);
    running.release();
    other.socket.write(`${PROMPT.length.toString(16)}\r\n${PROMPT}\r\n0\r\n\r\n`);
    await expect.poll(other.received).toMatch(/^HTTP\/1\.1 200 /);
  },
  async maxBodyDepth() {
    const running = await serveWith({});
    const nested = `{"a":${"[".repeat(100_000)}${"]".repeat(100_000)}}`;
    expect((await post(running, nested)).status).toBe(400);
  },
  async maxBodyMembers() {
    const running = await serveWith({});
    const members = Array.from({ length: 30_000 }, (_, at) => [`k${at}`, at]);
    expect((await post(running, JSON.stringify({ a: Object.fromEntries(members) }))).status).toBe(
      400,
    );
  },
};

function post({ url }: Running, body: string): Promise<Response> {
  return fetch(`${url}/v1/completions`, { method: "POST", body });
}

describe("limits of the HTTP of kv-peer", () => {
  it.each(Object.entries(tries))(
    "%s: the offender is refused, and others are served",
    async (_, attempt) => {
      await attempt();
    },
  );

  it("idle connections do not keep a new client out", async () => {
    const running = await serveWith({ maxConnections: 4, maxConnectionsPerAddress: 3 });
    const idle = [];
    for (let at = 0; at < 3; at += 1) idle.push(await running.open());
    // One more of this address, and one of another address.
    for (const from of [undefined, OTHER, OTHER]) await expectServed(running, from);
    expect(await idle[0]?.closed).toMatch(/^HTTP\/1\.1 503 /);
    expect(idle[2]?.socket.destroyed).toBe(false);
  });

  it("each limit is tried here", () => {
    expect(Object.keys(tries)).toEqual(Object.keys(PREFILL_LIMITS));
  });

  it("an answer to a refused body is short, and repeats nothing of it", async () => {
    const running = await serveWith({});
    for (const body of [
      '{"prompt": "a secret" oops}',
      JSON.stringify({ prompt: Array(300_000).fill("secret") }),
    ]) {
      const answer = await post(running, body);
      expect(answer.status).toBe(400);
      const text = await answer.text();
      expect(text.length).toBeLessThan(500);
      expect(text).not.toContain("secret");
    }
  });
});

it("the log of a prefill worker has no token ids of prompts and no credentials", async () => {
  const lines: unknown[] = [];
  const keep = (event: string, fields?: LogFields) => void lines.push(event, fields);
  const log = { debug: keep, info: keep, warn: keep, error: keep };
  const served = await serveSample({ leaseMs: 1000, numBlocks: 8, log });
  closing.push(() => served.close());
  const url = served.server.url;
  const headers = { authorization: "Bearer secret", "content-type": "application/json" };
  const ask = (prompt: unknown) =>
    fetch(`${url}/v1/completions`, {
      method: "POST",
      headers,
      body: JSON.stringify({ prompt, kv_transfer_params: { do_remote_decode: true } }),
    });
  const prompt = Array.from({ length: 90 }, () => 76_543);
  // The second one gets no blocks, the others are refused.
  const statuses = [];
  for (const given of [prompt, prompt, prompt, Array(500).fill(76_543), "a secret"])
    statuses.push((await ask(given)).status);
  expect(statuses).toContain(200);
  expect(statuses).toContain(503);
  expect(statuses).toContain(400);
  await expect.poll(() => served.prefill.blocks.used).toBe(0);
  expect(JSON.stringify(lines)).not.toMatch(/secret|76543/);
  // The lease that ran out is logged, so the log is the one that is read here.
  expect(lines.length).toBeGreaterThan(0);
});
