import { describe, expect, it } from "vitest";
import { postText, RawConnection } from "../../test/support/raw-connection.js";
import { serve, tokenizer } from "../../test/support/served-instance.js";
import { type HttpLimits, httpLimits } from "./limits.js";

const prompt = [5, 6, 7, 8, 9];
const greedy = { prompt, temperature: 0, max_tokens: 4, return_token_ids: true };
const GET = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n";

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

/** One try for each limit: the offender is refused, and another client is served. */
const tries: { readonly [K in keyof HttpLimits]: () => Promise<void> } = {
  async maxConnections() {
    const served = await serveWith({ maxConnections: 3, maxConnectionsPerAddress: 100 });
    const release = holdRequests(served);
    const body = JSON.stringify(greedy);
    const busy = await Promise.all([1, 2].map(() => RawConnection.open(served.url)));
    for (const connection of busy) connection.write(postText(body));
    await expect.poll(() => inEngine(served)).toBe(2);
    const idle = await RawConnection.open(served.url);
    await idle.write(GET).until(/200 OK/);
    // A new connection takes the place of an idle one.
    const newer = await RawConnection.open(served.url);
    await newer.write(postText(body));
    await idle.untilClosed();
    await expect.poll(() => inEngine(served)).toBe(3);
    const refused = await RawConnection.open(served.url);
    expect(await refused.untilClosed()).toMatch(/^HTTP\/1.1 503 .*\r\nretry-after: 1\r\n/);
    release();
    for (const connection of [...busy, newer]) await connection.until(/token_ids/);
    await expectServed(served);
  },
  async maxConnectionsPerAddress() {
    const served = await serveWith({ maxConnections: 100, maxConnectionsPerAddress: 2 });
    const release = holdRequests(served);
    const busy = await Promise.all([1, 2].map(() => RawConnection.open(served.url)));
    for (const connection of busy) connection.write(postText(JSON.stringify(greedy)));
    await expect.poll(() => inEngine(served)).toBe(2);
    const refused = await RawConnection.open(served.url);
    expect(await refused.untilClosed()).toMatch(/^HTTP\/1.1 503 /);
    release();
    for (const connection of busy) await connection.until(/token_ids/);
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
    const other = await RawConnection.open(served.url, "127.0.0.7");
    other.write(postText(JSON.stringify(greedy)));
    release();
    await other.until(/token_ids/);
    for (const response of await Promise.all(first)) expect(response.status).toBe(200);
  },
  async maxRequestsPerConnection() {
    const served = await serveWith({ maxRequestsPerConnection: 2 });
    // Else the first one can be answered before the server reads the next.
    const release = holdRequests(served);
    const connection = await RawConnection.open(served.url);
    connection.write(postText(JSON.stringify(greedy)).repeat(20));
    const text = await connection.untilClosed();
    expect(text.match(/HTTP\/1.1 \d+/g)).toEqual(["HTTP/1.1 503"]);
    release();
    await expectServed(served);
  },
  async maxHeaderBytes() {
    const served = await serveWith({ maxHeaderBytes: 2048 });
    const connection = await RawConnection.open(served.url);
    connection.write(postText("{}", { headers: `X-Long: ${"x".repeat(4096)}\r\n` }));
    expect(await connection.untilClosed()).toMatch(/^HTTP\/1.1 431 /);
    await expectServed(served);
  },
  async headerTimeoutMs() {
    const served = await serveWith({ headerTimeoutMs: 50 });
    const connection = await RawConnection.open(served.url);
    connection.write("POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ");
    expect(await connection.untilClosed()).toMatch(/^HTTP\/1.1 408 /);
    await expectServed(served);
  },
  async requestTimeoutMs() {
    const served = await serveWith({ requestTimeoutMs: 100, headerTimeoutMs: 100 });
    const connection = await RawConnection.open(served.url);
    connection.write(postText('{"prompt": [5,', { lengthBytes: 1000 }));
    expect(await connection.untilClosed()).toMatch(/^HTTP\/1.1 408 /);
    await expectServed(served);
  },
  async idleTimeoutMs() {
    const served = await serveWith({ idleTimeoutMs: 50 });
    const connection = await RawConnection.open(served.url);
    expect(await connection.write(GET).untilClosed()).toMatch(/^HTTP\/1.1 200 /);
    await expectServed(served);
  },
  async maxBodyBytes() {
    const served = await serveWith({ maxBodyBytes: 1000 });
    const connection = await RawConnection.open(served.url);
    connection.write(postText("", { lengthBytes: 2000 }));
    await connection.until(/^HTTP\/1.1 413 /);
    const chunked = await RawConnection.open(served.url);
    chunked.write(
      `POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n${" ".repeat(2000)}\r\n`,
    );
    await chunked.until(/^HTTP\/1.1 413 /);
    await expectServed(served);
  },
  async maxBodiesBytes() {
    const served = await serveWith({
      maxBodiesBytes: 100_000,
      maxBodiesBytesPerAddress: 100_000,
      maxBodyBytes: 100_000,
    });
    const slow = [90_000, 80_000].map(async (bytes, at) => {
      const connection = await RawConnection.open(served.url, `127.0.0.${at + 2}`);
      return connection.write(postText(" ".repeat(bytes), { lengthBytes: bytes + 1 }));
    });
    // The largest body that is still arriving makes room for the others.
    const text = await Promise.race(
      slow.map(async (connection) => (await connection).until(/\r\n\r\n/)),
    );
    expect(text).toMatch(/^HTTP\/1.1 503 [\s\S]*retry-after: 1\r\n/);
    await expectServed(served);
    for (const connection of slow) (await connection).close();
  },
  async maxBodiesBytesPerAddress() {
    const served = await serveWith({ maxBodiesBytesPerAddress: 100_000, maxBodyBytes: 100_000 });
    const open = async (bytes: number, from?: string) =>
      (await RawConnection.open(served.url, from)).write(
        postText(" ".repeat(bytes), { lengthBytes: bytes + 1 }),
      );
    const [first, second, other] = [
      await open(90_000),
      await open(80_000),
      await open(80_000, "127.0.0.2"),
    ];
    const text = await Promise.race(
      [first, second].map((connection) => connection.until(/\r\n\r\n/)),
    );
    expect(text).toMatch(/^HTTP\/1.1 503 [\s\S]*retry-after: 1\r\n/);
    await other.write(" ").until(/^HTTP\/1.1 400 /);
    for (const connection of [first, second, other]) connection.close();
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
      const connection = await RawConnection.open(served.url);
      const text = await connection.write(postText(`{"${field}":${nested}}`)).until(/\r\n\r\n.*\}/);
      expect(text).toMatch(/^HTTP\/1.1 400 [\s\S]*more than 64 levels/);
      connection.close();
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
    const connection = await RawConnection.open(served.url);
    const body = JSON.stringify({ ...greedy, max_tokens: 90, stream: true });
    connection.pause().write(postText(body));
    await expect.poll(() => [...served.connector.finished.values()][0]?.reason).toBe("aborted");
    connection.close();
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
    const connection = await RawConnection.open(served.url);
    connection.write(postText(JSON.stringify({ ...greedy, max_tokens: 200 })).repeat(4));
    await expect.poll(() => inEngine(served)).toBe(1);
    expect((await served.post({})).status).toBe(503);
    connection.close();
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
    const connection = await RawConnection.open(served.url);
    connection.write(GET.repeat(20));
    await connection.untilClosed();
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
    const connection = await RawConnection.open(url);
    const text = await connection
      .write(postText('{"prompt": "a secret" oops}'))
      .until(/\r\n\r\n.*\}/);
    expect(text).toMatch(/^HTTP\/1.1 400 /);
    expect(text).not.toContain("secret");
    connection.close();
  });
});
