import { once } from "node:events";
import { get } from "node:http";
import { deadUrl, decodeOk } from "@kv/testing/http/fake-upstream";
import { rawClient } from "@kv/testing/http/raw-client";
import { expect, test } from "vitest";
import { errorOf, post, runPair, sends, upstream } from "../support/set-up.js";

const changeAt = (adminUrl: string) => (what: string, instance: string) =>
  post(`${adminUrl}/instances/${what}`, { role: "decode", instance });

test("instances are added, drained and removed while requests pass", async () => {
  const { ask, adminUrl, proxy, d: d1 } = await runPair();
  const d2 = await upstream(decodeOk);
  const change = changeAt(adminUrl);
  expect((await change("add", d2.url)).status).toBe(200);
  expect(await errorOf(await change("add", d2.url))).toMatchObject({
    status: 409,
    code: "KV_CONFIG_INVALID",
    type: "invalid_request_error",
  });
  for (let times = 0; times < 2; times += 1) expect((await ask()).status).toBe(200);
  // The new one was asked for its models first.
  expect([d1.seen.length, d2.seen.length]).toEqual([1, 2]);
  expect((await change("drain", d1.url)).status).toBe(200);
  expect((await ask()).status).toBe(200);
  expect([d1.seen.length, d2.seen.length]).toEqual([1, 3]);
  await change("remove", d1.url);
  await expect.poll(() => proxy.status().decoders.map((one) => one.url)).toEqual([d2.url]);
  expect(await errorOf(await change("remove", d1.url))).toMatchObject({
    status: 404,
    code: "KV_PROXY_NO_INSTANCE",
  });
  expect((await post(`${adminUrl}/instances/add`, { role: "both", instance: "x" })).status).toBe(
    400,
  );
});

test("a rank of a data-parallel server is drained and removed alone, and has metrics of its own", async () => {
  const d = await upstream(decodeOk);
  const decoders = [`${d.url}@0`, `${d.url}@1`];
  const { metrics, ask, adminUrl, proxy } = await runPair({}, { decoders });
  const change = changeAt(adminUrl);
  const ranks = () => proxy.status().decoders.map((one) => [one.data_parallel_rank, one.state]);
  for (let index = 0; index < 4; index++) {
    if (index === 2) await change("drain", `${d.url}@1`);
    await ask();
  }
  expect(ranks()).toEqual([
    [0, "up"],
    [1, "draining"],
  ]);
  const shown = (await metrics()).split("\n");
  for (const ending of ['rank="0"} 3', 'rank="1"} 1'])
    expect(shown).toContain(
      `kv_proxy_instance_requests_total{role="decode",server="${d.url}",${ending}`,
    );
  expect((await change("remove", d.url)).status).toBe(404);
  expect((await change("remove", `${d.url}@1`)).status).toBe(200);
  await expect.poll(ranks).toEqual([[0, "up"]]);
});

test("admin routes refuse invalid requests with a 4xx in OpenAI's form", async () => {
  const { adminUrl } = await runPair();
  const change = changeAt(adminUrl);
  expect(await errorOf(await change("add", "ftp://x"))).toMatchObject({
    status: 400,
    code: "KV_CONFIG_INVALID",
  });
  expect(await errorOf(await change("add", "x".repeat(70_000)))).toMatchObject({
    code: "KV_REQUEST_INVALID",
    hint: "send less at once",
  });
  expect(await errorOf(await fetch(`${adminUrl}/nothing`))).toMatchObject({
    status: 404,
    code: "KV_REQUEST_INVALID",
  });
});

test("the admin routes are on their own port only, and require the token", async () => {
  const token = "a token of length";
  const { url, adminUrl } = await runPair({}, { admin: { port: 0, token } });
  expect((await post(`${url}/instances/add`, {})).status).toBe(404);
  expect((await fetch(`${url}/metrics`)).status).toBe(404);
  for (const path of ["/status", "/metrics", "/requests", "/events", "/nothing"]) {
    expect((await fetch(adminUrl + path)).status, path).toBe(401);
    expect((await fetch(`${adminUrl + path}?token=wrong`)).status, path).toBe(401);
  }
  const headers = { authorization: `Bearer ${token}` };
  expect(await (await fetch(`${adminUrl}/status`, { headers })).json()).toMatchObject({
    flow: "pull",
  });
  expect((await fetch(adminUrl)).headers.get("content-type")).toContain("text/html");
});

test("an admin host other than the loopback requires a token", async () => {
  const admin = { host: "0.0.0.0", port: 0 };
  await expect(runPair({}, { admin })).rejects.toThrow("admin.token");
});

test("/metrics has Prometheus metrics by endpoint, outcome and instance", async () => {
  const { p, d, ask, adminUrl } = await runPair();
  await ask({ prompt: ["a", "b"] });
  await ask({ n: 0 });
  const response = await fetch(`${adminUrl}/metrics`);
  const text = await response.text();
  expect(response.headers.get("content-type")).toContain("version=0.0.4");
  for (const line of [
    'kv_proxy_requests_total{endpoint="/v1/completions",outcome="200"} 1',
    'kv_proxy_requests_total{endpoint="/v1/completions",outcome="KV_REQUEST_INVALID"} 1',
    "kv_proxy_parts_total 2",
    "kv_proxy_prefill_duration_seconds_count 1",
    `kv_proxy_instance_requests_total{role="decode",server="${d.url}"} 2`,
    `kv_proxy_instance_available{role="prefill",server="${p.url}"} 1`,
  ]) {
    expect(text.split("\n")).toContain(line);
  }
  // Each has a help text of its own.
  for (const [, name, help] of text.matchAll(/^# HELP (\S+) (.*)$/gm)) expect(help).not.toBe(name);
});

test("/events streams requests when they end, with the times of their legs", async () => {
  const { p, d, ask, adminUrl } = await runPair();
  const [events] = (await once(get(`${adminUrl}/events`), "response")) as [
    NodeJS.ReadableStream & { destroy(): void },
  ];
  let text = "";
  events.setEncoding("utf8");
  events.on("data", (chunk: string) => (text += chunk));
  events.on("error", () => {});
  await expect.poll(() => text).toContain("event: status");
  await ask({}, { headers: { "x-request-id": "shown" } });
  await expect.poll(() => text).toContain("event: request\n");
  const record = JSON.parse(/event: request\ndata: (.*)\n/.exec(text)?.[1] ?? "{}");
  expect(record).toMatchObject({
    request_id: "shown",
    outcome: "200",
    prefill: p.url,
    decode: d.url,
  });
  const { prefill_from_ms, prefill_to_ms, decode_from_ms, first_byte_at_ms, duration_ms } = record;
  const times = [0, prefill_from_ms, prefill_to_ms, decode_from_ms, first_byte_at_ms, duration_ms];
  expect(times).not.toContain(undefined);
  expect(times).toEqual([...times].sort((a, b) => a - b));
  events.destroy();
  expect(await (await fetch(`${adminUrl}/requests`)).json()).toHaveLength(1);
});

test("a connection that sends a request before the answer to its last one is refused", async () => {
  const { adminUrl } = await runPair();
  const events = "GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n";
  const { closed } = await rawClient(adminUrl, events.repeat(40));
  expect(await closed).not.toContain("event: status");
  const pages = Array.from({ length: 32 }, () => new AbortController());
  const statuses = pages.map(
    async ({ signal }) => (await fetch(`${adminUrl}/events`, { signal })).status,
  );
  expect(await Promise.all(statuses)).toEqual(pages.map(() => 200));
  for (const page of pages) page.abort();
});

test("field.md R13: an instance is asked for its models before it is added", async () => {
  const models = (status: number, body: object) => upstream(sends(status, body));
  const d2 = await upstream(decodeOk);
  const { adminUrl, proxy } = await runPair({}, { model: "m" });
  const change = changeAt(adminUrl);
  for (const [instance, why] of [
    [await deadUrl(), "it does not answer"],
    ["http://no-such-name.invalid:1", "it does not answer"],
    [(await models(503, {})).url, "GET /v1/models was answered with status 503"],
    [(await models(200, { data: "x" })).url, "no list of models"],
    [(await models(200, { data: [{ id: "a" }, { id: "b" }] })).url, "it serves a, b, and not m"],
  ] as const)
    expect(await errorOf(await change("add", instance))).toMatchObject({
      status: 400,
      code: "KV_CONFIG_INVALID",
      message: expect.stringContaining(why),
    });
  expect(proxy.status().decoders).toHaveLength(1);
  // It wants a key, which only clients have.
  for (const instance of [d2.url, (await models(401, {})).url])
    expect((await change("add", instance)).status).toBe(200);
  expect(proxy.status().decoders).toHaveLength(3);
});
