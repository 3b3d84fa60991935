import { setTimeout as sleep } from "node:timers/promises";
import {
  type Answer,
  deadUrl,
  decodeOk,
  prefillOk,
  sendJson,
} from "@kv/testing/http/fake-upstream";
import { postText, rawClient } from "@kv/testing/http/raw-client";
import { recordedLog } from "@kv/testing/recorded-log";
import { expect, test } from "vitest";
import type { ProxyOptions } from "../../src/index.js";
import { breaks, errorOf, html, post, runFleet, sends } from "../support/set-up.js";

const EMBEDDINGS = "/v1/embeddings";

const start = (ds: readonly Answer[], options: ProxyOptions = {}) =>
  runFleet([prefillOk], ds, options);

const LARGE = JSON.stringify({ data: [{ embedding: "1.5,".repeat(5 * 1024 * 1024) }] });

test("F4: clients that do not read an answer of another route are dropped, and hold little", async () => {
  const { url, proxy } = await start([({ response }) => void response.writeHead(200).end(LARGE)], {
    timeouts: { stallMs: 4_000 },
    limits: { requestsPerClient: 40 },
  });
  const before = process.memoryUsage.rss();
  const clients = await Promise.all(
    Array.from({ length: 60 }, async () => {
      const client = await rawClient(url, postText('{"input":"a"}', "", EMBEDDINGS));
      client.socket.pause();
      return client;
    }),
  );
  await expect.poll(() => proxy.status().requests.refused[429]).toBe(20);
  await expect.poll(() => proxy.status().requests.in_flight, { timeout: 50_000 }).toBe(0);
  expect(proxy.status().requests.failed).toEqual({ KV_REQUEST_TIMEOUT: 40 });
  expect(process.memoryUsage.rss() - before).toBeLessThan(400 * 1024 * 1024);
  for (const { socket } of clients) socket.destroy();
  expect(proxy.status().decoders[0]).toMatchObject({ failures: 0, in_flight: 0 });
});

test("F5: bodies and answers pass byte for byte, of any length, under the client's id", async () => {
  const body = '{"input":"a", "seed": 9007199254740993,"x":1e400, "y":1.10}';
  const { d, url } = await start([({ response }) => void response.writeHead(200).end(LARGE)]);
  const answer = await post(`${url}${EMBEDDINGS}?a=b`, body, {
    headers: { "x-request-id": "own" },
  });
  expect([answer.status, await answer.text(), answer.headers.get("x-request-id")]).toEqual([
    200,
    LARGE,
    "own",
  ]);
  expect(d[0]?.seen[0]).toMatchObject({
    body,
    path: `${EMBEDDINGS}?a=b`,
    headers: { "x-request-id": "own" },
  });
});

test("F5: other routes are counted, measured and logged, and an answer that breaks off has failed", async () => {
  const { log, logged } = recordedLog();
  const { url, metrics, proxy, d } = await start(
    [
      ({ json, response }) => {
        if (json.input !== "breaks")
          return sendJson(response, {}, json.input === "bad" ? 422 : 200);
        response.writeHead(200, { "content-length": LARGE.length });
        response.write(LARGE.slice(0, 1024 * 1024), () => response.destroy());
      },
    ],
    { log },
  );
  for (const input of ["a", "bad"]) await post(url + EMBEDDINGS, { input });
  const broken = await post(url + EMBEDDINGS, { input: "breaks" });
  await expect(broken.text()).rejects.toThrow();
  await fetch(`${url}/v1/models/none`);
  await expect
    .poll(() => proxy.status().requests)
    .toMatchObject({
      total: 4,
      succeeded: 1,
      passed_errors: { 422: 1 },
      failed: { KV_PROXY_UPSTREAM_FAILED: 2 },
    });
  const shown = await metrics();
  for (const outcome of ["200", "422", "KV_PROXY_UPSTREAM_FAILED"])
    expect(shown).toContain(
      `kv_proxy_requests_total{endpoint="${EMBEDDINGS}",outcome="${outcome}"} 1`,
    );
  const line = { endpoint: EMBEDDINGS, status: 200, decode: d[0]?.url };
  expect(logged("request-done")).toContainEqual(expect.objectContaining(line));
});

test.each<[what: string, bad: Answer]>([
  ...[401, 403, 429, 502, 503, 500, 307].map((status): [string, Answer] => [
    `${status}`,
    sends(status),
  ]),
  ["HTML", html],
  ["an end before the answer", breaks],
])("F5: one of two D answers %s: no request fails, and it has the failures", async (_what, bad) => {
  const { url, proxy } = await start([bad, decodeOk], { timeouts: { coolDownMs: 1 } });
  for (let times = 0; times < 10; times += 1) {
    expect((await post(url + EMBEDDINGS, { input: "a" })).status).toBe(200);
    await sleep(2);
  }
  const [first, second] = proxy.status().decoders;
  expect([first?.failures, second?.failures]).toEqual([first?.requests, 0]);
});

test("F5: what the client has caused is passed on, and no failure of an instance", async () => {
  for (const status of [400, 413, 422]) {
    const refuses = sends(status, { error: "own" });
    const { url, proxy, d } = await start([refuses, refuses]);
    const answer = await post(url + EMBEDDINGS, { input: "a" });
    expect([answer.status, await answer.json()]).toEqual([status, { error: "own" }]);
    expect(d.map(({ seen }) => seen.length).sort()).toEqual([0, 1]);
    for (const { failures } of proxy.status().decoders) expect(failures).toBe(0);
  }
});

test("F5: no D can be reached, and a body that sets the connector's members", async () => {
  const { url } = await start([decodeOk], { decoders: [await deadUrl()] });
  expect(await errorOf(await post(url + EMBEDDINGS, { input: "a" }))).toMatchObject({
    status: 502,
    code: "KV_PROXY_UPSTREAM_FAILED",
  });
  expect((await post(url + EMBEDDINGS, { kv_transfer_params: {} })).status).toBe(400);
  expect((await post(url + EMBEDDINGS, "{")).status).toBe(400);
});
