// A long suite: waits for each limit of the admin servers.
import { get } from "node:http";
import { setTimeout as sleep } from "node:timers/promises";
import type { Answer } from "@kv/testing/http/fake-upstream";
import { postText, type RawClient, rawClient } from "@kv/testing/http/raw-client";
import { afterEach, expect, test } from "vitest";
import type { ProxyOptions } from "../../src/index.js";
import { PROXY_LIMITS } from "../support/proxy-limits.js";
import { post, runPair } from "../support/set-up.js";

type Limits = ProxyOptions["limits"];
type Timeouts = ProxyOptions["timeouts"];

const clients: RawClient[] = [];
afterEach(() => {
  for (const { socket } of clients.splice(0)) socket.destroy();
});

async function open(url: string, text = "", from?: string) {
  const client = await rawClient(url, text, from);
  clients.push(client);
  return client;
}

const start = (limits: Limits = {}, { timeouts = {} as Timeouts, hangs = false } = {}) =>
  runPair(hangs ? { p: () => {} } : {}, { limits, timeouts, admin: { port: 0 } });

const ask = async (
  url: string,
  body: unknown = { prompt: "a" },
  headers: Record<string, string> = {},
) => {
  const response = await post(`${url}/v1/completions`, body, { headers });
  return { status: response.status, retryAfter: response.headers.get("retry-after") };
};

const statusIn = (text: string) => Number(/^HTTP\/1\.1 (\d+)/.exec(text)?.[1]);

/** Resolves with the first status on a connection. */
async function statusOf(client: RawClient): Promise<number> {
  await expect.poll(client.received).toMatch(/^HTTP\/1\.1 \d+/);
  return statusIn(client.received());
}

/** The proxy serves another client, at another address. */
async function servesOthers(url: string): Promise<void> {
  const other = await open(url, postText('{"prompt":"a"}', "connection: close\r\n"), "127.0.0.9");
  expect(statusIn(await other.closed)).toBe(200);
}

/** Begins a request that stays in flight. */
async function inFlight({ url, p }: Awaited<ReturnType<typeof start>>, from?: string) {
  const before = p.seen.length;
  await open(url, postText('{"prompt":"a"}'), from);
  await p.request(before);
}

const BIG = "a".repeat(45_000);
const unfinished = (body: string) =>
  postText(body).replace(/content-length: \d+/, `content-length: ${body.length + 100}`);

/** For each limit, what reaches it; resolves with the status that the offender gets, or `close`. */
const TRIES: Record<string, () => Promise<number | "close">> = {
  "limits.connections": async () => {
    const proxy = await start({ connections: 2, connectionsPerAddress: 2 }, { hangs: true });
    await inFlight(proxy);
    await inFlight(proxy, "127.0.0.2");
    return statusOf(await open(proxy.url, "", "127.0.0.3"));
  },
  "limits.connectionsPerAddress": async () => {
    const { url } = await start({ connectionsPerAddress: 2 });
    const idle = await open(url);
    await open(url);
    await open(url);
    // The oldest idle connection makes room.
    const status = await statusOf(idle);
    await servesOthers(url);
    return status;
  },
  "limits.pipelinedRequests": async () => {
    const { url, p, proxy } = await start({ pipelinedRequests: 3 }, { hangs: true });
    const client = await open(url, postText('{"prompt":"a"}').repeat(50));
    const status = statusIn(await client.closed);
    expect(p.seen.length).toBeLessThanOrEqual(1);
    await expect.poll(() => proxy.status().requests.in_flight).toBe(0);
    return status;
  },
  "limits.requestsInFlight": async () => {
    const proxy = await start({ requestsInFlight: 2, requestsPerClient: 2 }, { hangs: true });
    await inFlight(proxy, "127.0.0.2");
    const parts = await ask(proxy.url, { prompt: ["a", "b"] });
    expect(parts).toEqual({ status: 503, retryAfter: "1" });
    await inFlight(proxy, "127.0.0.3");
    return (await ask(proxy.url)).status;
  },
  "limits.requestsPerClient": async () => {
    const proxy = await start({ requestsPerClient: 1 }, { hangs: true });
    await inFlight(proxy);
    const { status, retryAfter } = await ask(proxy.url);
    expect(retryAfter).toBe("1");
    await inFlight(proxy, "127.0.0.2");
    return status;
  },
  "limits.abandonedPrefillMs": async () => {
    const { url, p, proxy } = await start({ abandonedPrefillMs: 100 }, { hangs: true });
    const leaveAfter = async (at: number, ms: number) => {
      const client = await open(url, postText('{"prompt":"a"}'));
      await p.request(at);
      await sleep(ms);
      client.socket.destroy();
      await expect.poll(() => proxy.status().requests.in_flight).toBe(0);
    };
    await leaveAfter(0, 0);
    await leaveAfter(1, 150);
    const { status, retryAfter } = await ask(url);
    expect(Number(retryAfter)).toBeGreaterThan(0);
    expect(p.seen).toHaveLength(2);
    return status;
  },
  "limits.headersLengthBytes": async () => {
    const { url } = await start({ headersLengthBytes: 2_000 });
    return (await ask(url, {}, { "x-long": "a".repeat(3_000) })).status;
  },
  "limits.bodyLengthBytes": async () => {
    const { url, p } = await start({ bodyLengthBytes: 1_000 });
    const client = await open(
      url,
      postText("")
        .replace("length: 0", "length: 1001")
        .replace("host", "expect: 100-continue\r\nhost"),
    );
    // The client is not asked for a body that would be refused.
    expect(await statusOf(client)).toBe(413);
    const { status } = await ask(url, { prompt: "a".repeat(1_000) });
    expect(p.seen).toHaveLength(0);
    return status;
  },
  "limits.bodiesLengthBytes": async () => {
    const limits = {
      bodiesLengthBytes: 50_000,
      bodiesPerClientLengthBytes: 50_000,
      bodyLengthBytes: 50_000,
    };
    const { url } = await start(limits);
    const first = await open(url, unfinished(`{"prompt":"${BIG}aaaaa`));
    await expect.poll(() => first.socket.bytesWritten).toBeGreaterThan(45_000);
    const second = await open(url, unfinished(`{"prompt":"${BIG}`), "127.0.0.2");
    const refused = await Promise.race([statusOf(first), statusOf(second)]);
    await servesOthers(url);
    return refused;
  },
  "limits.bodiesPerClientLengthBytes": async () => {
    const { url, p } = await start({ bodiesPerClientLengthBytes: 50_000, bodyLengthBytes: 50_000 });
    // Copies count before any leg begins.
    expect((await ask(url, { prompt: BIG, n: 4 })).status).toBe(413);
    expect(p.seen).toHaveLength(0);
    const first = await open(url, unfinished(`{"prompt":"${BIG}`));
    const second = await open(url, unfinished(`{"prompt":"${BIG}`));
    const refused = await Promise.race([statusOf(first), statusOf(second)]);
    await servesOthers(url);
    return refused;
  },
  "limits.bodyDepth": async () => {
    const { url, p } = await start();
    for (const field of ["stream", "n", "min_tokens", "echo"]) {
      const nested = `{"prompt":"a","${field}":${"[".repeat(100_000)}${"]".repeat(100_000)}}`;
      expect((await ask(url, nested)).status, field).toBe(400);
    }
    const { status } = await ask(url, `{"prompt":"a","x":${"[".repeat(101)}${"]".repeat(101)}}`);
    expect(p.seen).toHaveLength(0);
    return status;
  },
  "limits.bodyMembers": async () => {
    const { url } = await start({ bodyMembers: 10 });
    return (await ask(url, { prompt: "a", x: Array(10).fill({}) })).status;
  },
  "limits.bodyValues": async () => {
    const { url } = await start({ bodyValues: 10 });
    expect((await ask(url, { prompt: Array(9).fill(1) })).status).toBe(200);
    return (await ask(url, { prompt: Array(12).fill(1) })).status;
  },
  "top-level members of a body": async () => {
    const { url } = await start();
    return (
      await ask(url, Object.fromEntries(Array.from({ length: 1_001 }, (_, i) => [`k${i}`, 1])))
    ).status;
  },
  "limits.parts": async () => {
    const { url } = await start({ parts: 2 });
    return (await ask(url, { prompt: "a", n: 3 })).status;
  },
  "length of X-Request-Id": async () => {
    const { url } = await start();
    expect((await ask(url, undefined, { "x-request-id": "a".repeat(128) })).status).toBe(200);
    return (await ask(url, undefined, { "x-request-id": "a".repeat(129) })).status;
  },
  "timeouts.headersMs": async () => {
    const { url } = await start({}, { timeouts: { headersMs: 50 } });
    const [silent, slow] = [await open(url), await open(url, "POST / HTTP/1.1\r\nhost")];
    await silent.closed;
    return statusIn(await slow.closed);
  },
  "timeouts.receiveMs": async () => {
    const { url } = await start({}, { timeouts: { receiveMs: 100 } });
    return statusIn(await (await open(url, unfinished("{"))).closed);
  },
  "timeouts.keepAliveMs": async () => {
    const { url } = await start({}, { timeouts: { keepAliveMs: 50 } });
    await (await open(url, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n")).closed;
    return "close";
  },
  "timeouts.stallMs": async () => {
    const chunk = Buffer.from(`data: {"choices":[{"index":0,"text":"${"a".repeat(60_000)}"}]}\n\n`);
    const endless: Answer = ({ response }) => {
      response.writeHead(200, { "content-type": "text/event-stream" });
      const write = () => {
        while (!response.destroyed && response.write(chunk)) {}
      };
      response.on("drain", write);
      write();
    };
    const { url, proxy } = await runPair({ d: endless }, { timeouts: { stallMs: 200 } });
    const client = await open(url, postText('{"prompt":"a","stream":true}'));
    client.socket.pause();
    await expect.poll(() => proxy.status().requests.failed).toEqual({ KV_REQUEST_TIMEOUT: 1 });
    return "close";
  },
  "admin: connections": async () => {
    const { adminUrl } = await start();
    const streams = await Promise.all(
      Array.from({ length: 3 }, (_, at) => followers(adminUrl, 10, `127.0.0.${at + 2}`)),
    );
    expect(streams.flat().filter((status) => status !== 200)).toEqual([]);
    const all = [];
    for (let at = 0; at < 128; at += 1) all.push(await open(adminUrl, "", `127.0.1.${at + 1}`));
    return Promise.race(all.map(statusOf));
  },
  "instances in x-prefiller-host-port": async () => {
    const { url, d } = await runPair({}, { prefillers: [], sidecar: { allow: ["10.0.0.0/8"] } });
    const names = Array.from({ length: 17 }, (_, at) => `10.0.0.${at}:8000`).join(",");
    const { status } = await ask(url, { prompt: "a" }, { "x-prefiller-host-port": names });
    expect(d.seen).toHaveLength(0);
    return status;
  },
  "admin: connections per address": async () => {
    const { adminUrl } = await start();
    const all = [];
    for (let at = 0; at < 65; at += 1) all.push(await open(adminUrl));
    return Promise.race(all.map(statusOf));
  },
  "admin: event streams": async () => {
    const { adminUrl } = await start();
    return (await followers(adminUrl, 33)).at(-1) ?? 0;
  },
  "admin: headers": async () => {
    const { adminUrl } = await start();
    return (await fetch(`${adminUrl}/status`, { headers: { "x-long": "a".repeat(17_000) } }))
      .status;
  },
  "admin: body": async () => {
    const { adminUrl } = await start();
    return (
      await post(`${adminUrl}/instances/add`, { role: "decode", instance: "x".repeat(70_000) })
    ).status;
  },
  "admin: time of a request": async () => {
    const { adminUrl } = await start();
    return statusIn(
      await (await open(adminUrl, "GET /status HTTP/1.1\r\nhost: localhost\r\n")).closed,
    );
  },
};

/** Opens pages that follow the events, one after the other; resolves with their statuses. */
async function followers(
  adminUrl: string,
  count: number,
  localAddress = "127.0.0.1",
): Promise<number[]> {
  const statuses: number[] = [];
  for (let at = 0; at < count; at += 1) {
    statuses.push(
      await new Promise<number>((resolve, reject) => {
        get(`${adminUrl}/events`, { localAddress, agent: false }, (response) => {
          response.on("error", () => {}).resume();
          resolve(response.statusCode ?? 0);
        }).on("error", reject);
      }),
    );
  }
  return statuses;
}

test("each limit of the list is tried", () => {
  expect(Object.keys(TRIES).sort()).toEqual(PROXY_LIMITS.map(({ name }) => name).sort());
});

test.each(PROXY_LIMITS)("the offender against $name gets $refusal", async ({ name, refusal }) => {
  expect(await TRIES[name]?.()).toBe(refusal);
});
