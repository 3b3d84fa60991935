import { postText, type RawClient, rawClient } from "@kv/testing/http/raw-client";
import { describe, expect, it } from "vitest";
import { serve, tokenizer } from "../../test/support/served-instance.js";
import { type HttpLimits, httpLimits } from "./limits.js";

const prompt = [5, 6, 7, 8, 9];
const greedy = { prompt, temperature: 0, max_tokens: 4, return_token_ids: true };
const POST = postText(JSON.stringify(greedy));
const GET = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n";

/** A POST whose head promises more than the body that is sent. */
const begun = (body: string, lengthBytes: number) =>
  postText(body).replace(/content-length: \d+/, `content-length: ${lengthBytes}`);

/** What a client has got when `pattern` matches it. */
async function until({ received }: RawClient, pattern: RegExp): Promise<string> {
  await expect.poll(received).toMatch(pattern);
  return received();
}

type Served = Awaited<ReturnType<typeof serve>>;
const serveWith = (limits: Partial<HttpLimits>): Promise<Served> => serve({}, { limits });

/** Another client gets its answer. */
async function expectServed({ post, model }: Served): Promise<void> {
  const answer = (await (await post(greedy)).json()) as { choices: { token_ids: number[] }[] };
  expect(answer.choices[0]?.token_ids).toEqual(model.generate(prompt, 4));
}

/** Requests that the engine has. */
function inEngine({ engine }: Served): number {
  const { running = 0, waiting = 0 } = engine.outstanding();
  return running + waiting;
}

/** Opens requests that stay with the engine until `release`. */
function holdRequests(served: Served): () => void {
  let release = () => {};
  const held = new Promise<void>((resolve) => {
    release = resolve;
  });
  served.model.before = () => held;
  return release;
}

/** A connection gets this status and its end, and another client is served. */
async function expectEnded(limits: Partial<HttpLimits>, text: string, status: number) {
  const served = await serveWith(limits);
  const { closed } = await rawClient(served.url, text);
  expect(await closed).toMatch(new RegExp(`^HTTP/1.1 ${status} `));
  await expectServed(served);
}

/** Connections whose requests are with the engine. */
async function openBusy(served: Served, count: number): Promise<RawClient[]> {
  const before = inEngine(served);
  const busy = await Promise.all(Array.from({ length: count }, () => rawClient(served.url, POST)));
  await expect.poll(() => inEngine(served)).toBe(before + count);
  return busy;
}

/** A client whose body lacks its last byte. */
const openSlow = ({ url }: Served, bytes: number, from?: string) =>
  rawClient(url, begun(" ".repeat(bytes), bytes + 1), from);

async function expectOneRefused(clients: readonly RawClient[]): Promise<void> {
  const text = await Promise.race(clients.map((client) => until(client, /\r\n\r\n/)));
  expect(text).toMatch(/^HTTP\/1.1 503 [\s\S]*retry-after: 1\r\n/);
}

/** One try for each limit: the offender is refused, and another client is served. */
const tries: { readonly [K in keyof HttpLimits]: () => Promise<void> } = {
  async maxConnections() {
    const served = await serveWith({ maxConnections: 3, maxConnectionsPerAddress: 100 });
    const release = holdRequests(served);
    const busy = await openBusy(served, 2);
    const idle = await rawClient(served.url, GET);
    await until(idle, /200 OK/);
    // A new connection takes the place of an idle one.
    busy.push(...(await openBusy(served, 1)));
    await idle.closed;
    const refused = await rawClient(served.url);
    expect(await refused.closed).toMatch(/^HTTP\/1.1 503 .*\r\nretry-after: 1\r\n/);
    release();
    for (const client of busy) await until(client, /token_ids/);
    await expectServed(served);
  },
  async maxConnectionsPerAddress() {
    const served = await serveWith({ maxConnections: 100, maxConnectionsPerAddress: 2 });
    const release = holdRequests(served);
    const busy = await openBusy(served, 2);
    const refused = await rawClient(served.url);
    expect(await refused.closed).toMatch(/^HTTP\/1.1 503 /);
    release();
    for (const client of busy) await until(client, /token_ids/);
    await expectServed(served);
  },
  async maxRequests() {
    const served = await serveWith({ maxRequests: 2, maxRequestsPerAddress: 100 });
    const release = holdRequests(served);
    const first = [served.post(greedy), served.post(greedy)];
    await expect.poll(() => inEngine(served)).toBe(2);
    const refused = await served.post(greedy);
    expect([refused.status, refused.headers.get("retry-after")]).toEqual([503, "1"]);
    expect(await refused.json()).toMatchObject({
      error: { message: expect.stringContaining("2 requests") },
    });
    expect((await fetch(`${served.url}/health`)).status).toBe(200);
    release();
    for (const response of await Promise.all(first)) expect(response.status).toBe(200);
    await expectServed(served);
  },
  async maxRequestsPerAddress() {
    const served = await serveWith({ maxRequests: 100, maxRequestsPerAddress: 2 });
    const release = holdRequests(served);
    const first = [served.post(greedy), served.post(greedy)];
    await expect.poll(() => inEngine(served)).toBe(2);
    const refused = await served.post(greedy);
    expect(refused.status).toBe(503);
    expect(await refused.json()).toMatchObject({
      error: { message: expect.stringContaining("this client") },
    });
    const other = await rawClient(served.url, POST, "127.0.0.7");
    release();
    await until(other, /token_ids/);
    for (const response of await Promise.all(first)) expect(response.status).toBe(200);
  },
  async maxRequestsPerConnection() {
    const served = await serveWith({ maxRequestsPerConnection: 2 });
    // Else the first one can be answered before the server reads the next.
    const release = holdRequests(served);
    const { closed } = await rawClient(served.url, POST.repeat(20));
    expect((await closed).match(/HTTP\/1.1 \d+/g)).toEqual(["HTTP/1.1 503"]);
    release();
    await expectServed(served);
  },
  maxHeaderBytes: () =>
    expectEnded({ maxHeaderBytes: 2048 }, postText("{}", `X-Long: ${"x".repeat(4096)}\r\n`), 431),
  headerTimeoutMs: () =>
    expectEnded({ headerTimeoutMs: 50 }, "POST /v1/completions HTTP/1.1\r\nX-Slow: ", 408),
  requestTimeoutMs: () =>
    expectEnded(
      { requestTimeoutMs: 100, headerTimeoutMs: 100 },
      begun('{"prompt": [5,', 1000),
      408,
    ),
  idleTimeoutMs: () => expectEnded({ idleTimeoutMs: 50 }, GET, 200),
  async maxBodyBytes() {
    const served = await serveWith({ maxBodyBytes: 1000 });
    const chunk = `7d0\r\n${" ".repeat(2000)}\r\n`;
    for (const text of [begun("", 2000), postText(chunk, "transfer-encoding: chunked\r\n")])
      await until(await rawClient(served.url, text), /^HTTP\/1.1 413 /);
    await expectServed(served);
  },
  async maxBodiesBytes() {
    const served = await serveWith({
      maxBodiesBytes: 100_000,
      maxBodiesBytesPerAddress: 100_000,
      maxBodyBytes: 100_000,
    });
    const slow = await Promise.all(
      [90_000, 80_000].map((bytes, at) => openSlow(served, bytes, `127.0.0.${at + 2}`)),
    );
    // The largest body that is still arriving makes room for the others.
    await expectOneRefused(slow);
    await expectServed(served);
    for (const { socket } of slow) socket.destroy();
  },
  async maxBodiesBytesPerAddress() {
    const served = await serveWith({ maxBodiesBytesPerAddress: 100_000, maxBodyBytes: 100_000 });
    const slow = [await openSlow(served, 90_000), await openSlow(served, 80_000)];
    const other = await openSlow(served, 80_000, "127.0.0.2");
    await expectOneRefused(slow);
    other.socket.write(" ");
    await until(other, /^HTTP\/1.1 400 /);
    for (const { socket } of [...slow, other]) socket.destroy();
    await expectServed(served);
    await expect.poll(async () => (await served.post({ x: "x".repeat(90_000) })).status).toBe(400);
  },
  async maxBodyDepth() {
    const served = await serve();
    for (const field of [
      "prompt",
      "stream",
      "n",
      "min_tokens",
      "echo",
      "seed",
      "stop",
      "kv_transfer_params",
    ]) {
      const nested = `${"[".repeat(100_000)}${"]".repeat(100_000)}`;
      const client = await rawClient(served.url, postText(`{"${field}":${nested}}`));
      await until(client, /^HTTP\/1.1 400 [\s\S]*more than 64 levels/);
      client.socket.destroy();
    }
    await expectServed(served);
  },
  async maxBodyMembers() {
    const served = await serve();
    const members = Array.from({ length: 30_000 }, (_, i) => [`k${i}`, i]);
    const response = await served.post({
      ...greedy,
      kv_transfer_params: Object.fromEntries(members),
    });
    expect(response.status).toBe(400);
    expect(await response.text()).toContain("more than 20000");
    await expectServed(served);
  },
  async maxUnreadBytes() {
    // Larger events than a socket's buffers hold.
    const decode = (tokens: ArrayLike<number>) => "x".repeat(1_000_000 * tokens.length);
    const served = await serve(
      { tokenizer: { ...tokenizer, decode } },
      { limits: { maxUnreadBytes: 20_000 } },
    );
    // As a model does, this one lets the event loop turn between tokens.
    served.model.before = () => new Promise((resolve) => setImmediate(resolve));
    const { socket } = await rawClient(served.url);
    socket.pause().write(postText(JSON.stringify({ ...greedy, max_tokens: 90, stream: true })));
    await expect.poll(() => [...served.connector.finished.values()][0]?.reason).toBe("aborted");
    socket.destroy();
    await expectServed(served);
  },
};

describe("limits of the HTTP server", () => {
  it.each(Object.entries(tries))(
    "%s: the offender is refused, and others are served",
    async (_, attempt) => {
      await attempt();
    },
  );

  it("has a default for each limit", () => {
    expect(Object.keys(httpLimits()).sort()).toEqual(Object.keys(tries).sort());
    expect(httpLimits({ maxBodyBytes: 7 })).toMatchObject({ maxBodyBytes: 7, maxRequests: 1024 });
  });
});

describe("pipelined requests of a client that leaves", () => {
  it("are aborted and give their places back", async () => {
    const served = await serveWith({ maxRequests: 1, maxRequestsPerAddress: 1 });
    const release = holdRequests(served);
    const body = JSON.stringify({ ...greedy, max_tokens: 200 });
    const { socket } = await rawClient(served.url, postText(body).repeat(4));
    await expect.poll(() => inEngine(served)).toBe(1);
    expect((await served.post({})).status).toBe(503);
    socket.destroy();
    await expect.poll(async () => (await served.post({})).status).toBe(400);
    let steps = 0;
    release();
    served.model.before = async () => {
      steps += 1;
    };
    await expectServed(served);
    expect(inEngine(served)).toBe(0);
    expect(steps).toBeLessThan(20);
  });

  it("are counted no longer after a refusal closed their connection", async () => {
    const served = await serveWith({
      maxRequests: 4,
      maxRequestsPerAddress: 4,
      maxRequestsPerConnection: 2,
    });
    await (await rawClient(served.url, GET.repeat(20))).closed;
    await expectServed(served);
  });
});

describe("bodies that are refused at once", () => {
  it.each([
    ["a million wrong tokens", { prompt: Array.from({ length: 500_000 }, () => "x") }],
    ["a million empty messages", { messages: Array.from({ length: 500_000 }, () => 0) }],
    ["a seed of a megabyte", { seed: "x".repeat(1_000_000) }],
    ["a stop of a megabyte", { stop: "x".repeat(1_000_000) }],
    ["a prompt of a megabyte for a model of 512 tokens", { prompt: "1 ".repeat(500_000) }],
  ])("%s gives 400 and a short message", async (_, fields) => {
    const served = await serve();
    const path = "messages" in fields ? "/v1/chat/completions" : "/v1/completions";
    const response = await served.post({ ...greedy, ...fields }, { path });
    expect(response.status).toBe(400);
    expect((await response.text()).length).toBeLessThan(2000);
  });

  it("names no text of a body that is not JSON", async () => {
    const { url } = await serve();
    const client = await rawClient(url, postText('{"prompt": "a secret" oops}'));
    expect(await until(client, /^HTTP\/1.1 400 [\s\S]*\r\n\r\n.*\}/)).not.toContain("secret");
    client.socket.destroy();
  });
});
