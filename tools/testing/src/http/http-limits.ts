import { expect, onTestFinished } from "vitest";
import { postText, type RawClient, rawClient } from "./raw-client.js";

export interface LimitedServer {
  readonly url: string;
  /** Of a POST to /v1/completions, which is answered with 200 after `release`. */
  readonly body: string;
  /** Such requests that have come. */
  asked(): number;
  release(): void;
}

const GET = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n";
const OTHER = "127.0.0.2";

/** The begin of a chunked body of spaces. */
const chunked = (bytes: number) =>
  postText(`${bytes.toString(16)}\r\n${" ".repeat(bytes)}\r\n`, "transfer-encoding: chunked\r\n");

async function open({ url }: LimitedServer, text?: string, from?: string): Promise<RawClient> {
  const client = await rawClient(url, text, from);
  onTestFinished(() => void client.socket.destroy());
  return client;
}

/** The head of the answer to a client. */
async function answerTo(client: RawClient): Promise<string> {
  await expect.poll(client.received).toContain("\r\n\r\n");
  return client.received();
}

const untilClosed = async (server: LimitedServer, text: string) =>
  (await open(server, text)).closed;

/** Opens a connection whose request is not answered yet. */
async function openBusy(server: LimitedServer): Promise<RawClient> {
  const before = server.asked();
  const client = await open(server, postText(server.body));
  await expect.poll(server.asked).toBe(before + 1);
  return client;
}

/** Another client is served. */
async function expectServed(server: LimitedServer, from?: string): Promise<void> {
  const client = await open(server, GET, from);
  expect(await answerTo(client)).toMatch(/^HTTP\/1\.1 200 /);
  client.socket.destroy();
}

async function expectAnswered(server: LimitedServer, clients: readonly RawClient[]): Promise<void> {
  server.release();
  for (const client of clients) expect(await answerTo(client)).toMatch(/^HTTP\/1\.1 200 /);
  await expectServed(server);
}

const post = ({ url }: LimitedServer, body: string) =>
  fetch(`${url}/v1/completions`, {
    method: "POST",
    body,
    headers: { "content-type": "application/json" },
  });

/**
 * What happens at each limit of an engine's HTTP server (`HttpLimits` and `BodiesLimits` of
 * `@kv/http`): the offender is refused, and others are served.
 */
export function httpLimitTries(
  serve: (limits: Readonly<Record<string, number>>) => Promise<LimitedServer>,
) {
  return {
    async maxConnections() {
      const server = await serve({ maxConnections: 3, maxConnectionsPerAddress: 100 });
      const busy = [await openBusy(server), await openBusy(server)];
      const idle = await open(server, GET);
      await answerTo(idle);
      // A new connection takes the place of an idle one.
      busy.push(await openBusy(server));
      await idle.closed;
      expect(await untilClosed(server, "")).toMatch(/^HTTP\/1\.1 503 .*\r\nretry-after: 1\r\n/);
      await expectAnswered(server, busy);
    },
    async maxConnectionsPerAddress() {
      const server = await serve({ maxConnections: 100, maxConnectionsPerAddress: 2 });
      const busy = [await openBusy(server), await openBusy(server)];
      expect(await untilClosed(server, "")).toMatch(/^HTTP\/1\.1 503 /);
      await expectServed(server, OTHER);
      await expectAnswered(server, busy);
    },
    async maxRequests() {
      const server = await serve({ maxRequests: 2, maxRequestsPerAddress: 100 });
      const busy = [await openBusy(server), await openBusy(server)];
      const refused = await answerTo(await open(server, postText(server.body)));
      expect(refused).toMatch(/^HTTP\/1\.1 503 [\s\S]*retry-after: 1\r\n/);
      await expectAnswered(server, busy);
    },
    async maxRequestsPerAddress() {
      const server = await serve({ maxRequests: 100, maxRequestsPerAddress: 1 });
      const busy = await openBusy(server);
      expect((await post(server, server.body)).status).toBe(503);
      const other = await open(server, postText(server.body), OTHER);
      await expectAnswered(server, [busy, other]);
    },
    async maxHeaderBytes() {
      const server = await serve({ maxHeaderBytes: 2048 });
      const long = postText("", `x-long: ${"x".repeat(4096)}\r\n`);
      expect(await untilClosed(server, long)).toMatch(/^HTTP\/1\.1 431 /);
      await expectServed(server);
    },
    async headerTimeoutMs() {
      const server = await serve({ headerTimeoutMs: 50, requestTimeoutMs: 100 });
      const slow = "GET /health HTTP/1.1\r\nx-slow: ";
      expect(await untilClosed(server, slow)).toMatch(/^HTTP\/1\.1 408 /);
      await expectServed(server);
    },
    async requestTimeoutMs() {
      const server = await serve({ headerTimeoutMs: 50, requestTimeoutMs: 100 });
      expect(await untilClosed(server, chunked(10))).toMatch(/^HTTP\/1\.1 408 /);
      await expectServed(server);
    },
    async idleTimeoutMs() {
      const server = await serve({ idleTimeoutMs: 50 });
      expect(await untilClosed(server, GET)).toMatch(/^HTTP\/1\.1 200 /);
    },
    async maxBodyBytes() {
      const server = await serve({ maxBodyBytes: 1000 });
      const announced = postText("").replace("length: 0", "length: 1001");
      for (const text of [announced, chunked(1001)])
        expect(await answerTo(await open(server, text))).toMatch(/^HTTP\/1\.1 413 /);
      await expectServed(server);
    },
    async maxBodiesBytes() {
      const server = await serve({
        maxBodiesBytes: 100_000,
        maxBodiesBytesPerAddress: 100_000,
        maxBodyBytes: 100_000,
      });
      const bodies = [
        await open(server, chunked(90_000)),
        await open(server, chunked(80_000), OTHER),
      ];
      // The largest body that is still arriving makes room; the first 16 KiB of each do not count.
      const refused = await Promise.race(bodies.map(answerTo));
      expect(refused).toMatch(/^HTTP\/1\.1 503 [\s\S]*retry-after: 1\r\n/);
      await expectServed(server);
      for (const { socket } of bodies) socket.destroy();
      server.release();
      const again = () => post(server, server.body + " ".repeat(90_000));
      await expect.poll(async () => (await again()).status).toBe(200);
    },
    async maxBodiesBytesPerAddress() {
      const server = await serve({ maxBodiesBytesPerAddress: 100_000, maxBodyBytes: 100_000 });
      const bodies = [await open(server, chunked(90_000)), await open(server, chunked(80_000))];
      expect(await Promise.race(bodies.map(answerTo))).toMatch(/^HTTP\/1\.1 503 /);
      const other = await open(server, chunked(80_000), OTHER);
      other.socket.write(`${server.body.length.toString(16)}\r\n${server.body}\r\n0\r\n\r\n`);
      await expectAnswered(server, [other]);
    },
    async maxBodyDepth() {
      const server = await serve({});
      const nested = `{"prompt":${"[".repeat(100_000)}${"]".repeat(100_000)}}`;
      const answer = await post(server, nested);
      expect([answer.status, await answer.text()]).toEqual([
        400,
        expect.stringContaining("more than 64 levels"),
      ]);
      await expectServed(server);
    },
    async maxBodyMembers() {
      const server = await serve({});
      const members = Array.from({ length: 30_000 }, (_, at) => [`k${at}`, at]);
      const answer = await post(server, JSON.stringify({ a: Object.fromEntries(members) }));
      expect([answer.status, await answer.text()]).toEqual([
        400,
        expect.stringContaining("more than 20000"),
      ]);
      await expectServed(server);
    },
  };
}
