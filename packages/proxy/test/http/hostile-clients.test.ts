import { once } from "node:events";
import { postText, rawClient } from "@kv/testing/http/raw-client";
import { manualClock } from "@kv/testing/manual-clock";
import { recordedLog } from "@kv/testing/recorded-log";
import { expect, test } from "vitest";
import type { ProxyOptions } from "../../src/index.js";
import { errorOf, type RunningProxy, runPair } from "../support/set-up.js";

const start = (settings: ProxyOptions = {}) => runPair({}, settings);

const chunked = "transfer-encoding: chunked\r\nconnection: close\r\n";
const body = '{"prompt":"a"}';
const chunks = `${body.length.toString(16)}\r\n${body}\r\n0\r\n\r\n`;

test.each([
  ["two Host headers", postText(body, "Host: y\r\nconnection: close\r\n"), 400],
  ["HTTP/2.0 in the request line", postText(body).replace("HTTP/1.1", "HTTP/2.0"), 505],
  ["HTTP/1.0 with chunks", postText("", chunked).replace("HTTP/1.1", "HTTP/1.0") + chunks, 400],
  [
    "a coding before chunked",
    postText("", chunked.replace("chunked", "gzip, chunked")) + chunks,
    501,
  ],
])("a request with %s is refused, and its connection closes", async (_what, text, status) => {
  const { url, p } = await start();
  const client = await rawClient(url, text);
  expect(await client.closed).toMatch(new RegExp(`^HTTP/1\\.1 ${status} `));
  expect(p.seen).toHaveLength(0);
});

test("chunks, and a target in absolute form, are served", async () => {
  const { url } = await start();
  const plain = await rawClient(url, postText("", chunked) + chunks);
  expect(await plain.closed).toMatch(/^HTTP\/1\.1 200 /);
  const absolute = postText(body, "connection: close\r\n", "http://x/v1/completions");
  expect(await (await rawClient(url, absolute)).closed).toMatch(/^HTTP\/1\.1 200 /);
});

test("a client that expects 100 is asked for its body, and gets its answer", async () => {
  const { url } = await start();
  const text = postText(body, "expect: 100-continue\r\nconnection: close\r\n");
  const client = await rawClient(url, text.slice(0, -body.length));
  await expect.poll(client.received).toContain("100 Continue");
  client.socket.write(body);
  expect(await client.closed).toContain("HTTP/1.1 200 OK");
});

test("a connection that timed out does not keep its descriptor when the client leaves it open", async () => {
  const clock = manualClock();
  const { url } = await start({ clock, timeouts: { headersMs: 50 } });
  const client = await rawClient(url, "POST / HTTP/1.1\r\n");
  client.socket.pause();
  // Half-open: this side never closes.
  client.socket.allowHalfOpen = true;
  client.socket.resume();
  await once(client.socket, "end");
  expect(client.received()).toMatch(/^HTTP\/1\.1 408 /);
  const gone = new Promise((resolve) => client.socket.once("error", resolve));
  clock.advance(2_000);
  // A write to a socket that is destroyed on the other side is answered with a reset.
  const writing = setInterval(() => client.socket.write("x"), 20);
  await gone.finally(() => clearInterval(writing));
});

test("an error repeats only the begin of a long value", async () => {
  const { ask } = await start();
  const seed = await errorOf(await ask({ n: 2, seed: "7".repeat(1_000_000) }));
  expect(seed.status).toBe(400);
  expect(seed.message.length).toBeLessThan(200);
});

test("instances get credentials only where a setting says so, and their absence is logged once", async () => {
  const headers = {
    authorization: "Bearer k",
    cookie: "c",
    "x-api-key": "k",
    "x-data-parallel-rank": "1",
  };
  const { log, logged } = recordedLog();
  const closed = await start({ log });
  for (const prompt of ["a", "b"]) await closed.ask({ prompt }, { headers });
  const both = "accept-encoding connection content-length content-type host x-request-id".split(
    " ",
  );
  for (const [{ seen }, own] of [
    [closed.p, []],
    [closed.d, ["accept", "x-data-parallel-rank"]],
  ] as const)
    for (const one of seen)
      expect(Object.keys(one.headers).sort()).toEqual([...both, ...own].sort());
  expect(logged("header-not-forwarded")).toHaveLength(1);
  const open = await start({ forwardHeaders: ["Authorization"] });
  await open.ask({}, { headers });
  expect(open.d.seen[0]?.headers).toMatchObject({ authorization: "Bearer k" });
  expect(open.d.seen[0]?.headers.cookie).toBeUndefined();
  await expect(start({ forwardHeaders: ["host"] })).rejects.toThrow("forwardHeaders");
});

test.each([
  ["a name that is not of this host", { host: "evil.example" }, 403],
  ["a page of another origin", { origin: "http://evil.example" }, 403],
  ["a page without an origin", { origin: "null" }, 403],
  ["a form", { "content-type": "text/plain" }, 415],
  ["a name that the settings allow", { host: "ops.example" }, 200],
])("the admin routes answer %s with %#", async (_what, headers, status) => {
  const { adminUrl, proxy, p } = await start({ admin: { port: 0, allowedHosts: ["ops.example"] } });
  const { host } = new URL(adminUrl);
  const given = { host, "content-type": "application/json", ...headers } as Record<string, string>;
  const text = JSON.stringify({ role: "decode", instance: p.url });
  const lines = Object.entries(given).map(([name, value]) => `${name}: ${value}\r\n`);
  const client = await rawClient(
    adminUrl,
    `POST /instances/add HTTP/1.1\r\n${lines.join("")}content-length: ${text.length}\r\nconnection: close\r\n\r\n${text}`,
  );
  expect(await client.closed).toMatch(new RegExp(`^HTTP/1\\.1 ${status} `));
  expect(proxy.status().decoders).toHaveLength(status === 200 ? 2 : 1);
});

test("strain.md, low: the Host of a request in absolute form is that of its target", async () => {
  const { adminUrl } = await start();
  const { host } = new URL(adminUrl);
  for (const [target, status] of [
    ["http://evil.example/status", 403],
    [`http://${host}/status`, 200],
  ] as const) {
    const client = await rawClient(
      adminUrl,
      `GET ${target} HTTP/1.1\r\nHost: ${host}\r\nconnection: close\r\n\r\n`,
    );
    expect(await client.closed).toMatch(new RegExp(`^HTTP/1\\.1 ${status} `));
  }
});

test("field.md R13: a body with a coding is answered with 415, and names it", async () => {
  const { ask } = await start();
  const headers = { "content-encoding": "gzip" };
  expect(await errorOf(await ask("\u001f\u008b", { headers }))).toMatchObject({
    status: 415,
    message: expect.stringContaining("gzip"),
  });
});

test("with a token, any name is served, unless names are set", async () => {
  const token = "a token of length";
  const ask = async ({ adminUrl }: RunningProxy) => {
    const client = await rawClient(
      adminUrl,
      `GET /status HTTP/1.1\r\nhost: kv-proxy.svc:9090\r\nauthorization: Bearer ${token}\r\nconnection: close\r\n\r\n`,
    );
    return Number((await client.closed).slice(9, 12));
  };
  expect(await ask(await start({ admin: { port: 0, token } }))).toBe(200);
  expect(await ask(await start({ admin: { port: 0, token, allowedHosts: ["a"] } }))).toBe(403);
});
