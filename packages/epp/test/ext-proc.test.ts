import { once } from "node:events";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { DECODE_ROUTES } from "@kv/fleet/front-end";
import { silentLog } from "@kv/interface";
import { POOL_PEER, POOL_PROMPT, poolContent } from "@kv/testing/http/pool-content";
import { expect, onTestFinished, test } from "vitest";
import { clientOf, GatewayRequest, runPicker, send, subsetHint } from "./support/gateway.js";

const P = ["127.0.0.1:11", "127.0.0.1:12"];
const D = ["127.0.0.1:21", "127.0.0.1:22", "127.0.0.1:23"];

async function picked(options: Parameters<typeof runPicker>[0] = {}) {
  const running = await runPicker({ prefillers: P, decoders: D, ...options });
  return { ...running, client: clientOf(running.port) };
}

test("D is named in the header and in the metadata with the one to try in its place, P in a header of its own", async () => {
  const { client } = await picked();
  const { headers, destination } = await send(client).choice();
  expect(destination).toBe("127.0.0.1:21,127.0.0.1:22");
  expect(headers["x-gateway-destination-endpoint"]).toBe(destination);
  expect(headers["x-prefiller-host-port"]).toBe("127.0.0.1:11,127.0.0.1:12");
});

test("instances take turns, also those that are named in place of others", async () => {
  const { client } = await picked({ fallbacks: 2 });
  const chosen: string[] = [];
  for (let i = 0; i < 4; i += 1) {
    const request = send(client);
    chosen.push((await request.choice()).destination.split(",")[0] ?? "");
    request.answer(200);
    await request.ended;
  }
  expect(chosen).toEqual([D[0], D[1], D[2], D[0]]);
});

test("without fallbacks one of each is named", async () => {
  const { client } = await picked({ fallbacks: 0 });
  const { headers, destination } = await send(client).choice();
  expect([destination, headers["x-prefiller-host-port"]]).toEqual([D[0], P[0]]);
});

test("a body of many pieces passes byte for byte, in pieces of 64 KiB at most", async () => {
  const { client } = await picked();
  const text = JSON.stringify({ prompt: "äöü ".repeat(100_000) });
  const bytes = Buffer.from(text);
  const request = new GatewayRequest(client);
  request.headers({});
  for (let at = 0; at < bytes.length; at += 200_001)
    request.body(bytes.subarray(at, at + 200_001), false);
  request.body("", true);
  expect((await request.passedBody()).equals(bytes)).toBe(true);
  const sizes = request.answers.map(
    (each) => each.request_body?.response.body_mutation.streamed_response.body.length,
  );
  expect(Math.max(...sizes.filter((size) => size !== undefined))).toBeLessThanOrEqual(64 * 1024);
});

test("a body of many small messages is kept, and passed on, as one", async () => {
  const { client } = await picked();
  const text = JSON.stringify({ prompt: "a b c" });
  const request = new GatewayRequest(client);
  request.headers({});
  for (const character of text) request.body(character, false);
  request.body("", true);
  expect((await request.passedBody()).toString()).toBe(text);
  expect(request.answers.filter((message) => message.request_body !== undefined)).toHaveLength(1);
});

test("a body that trailers end is passed on before them, and is not ended itself", async () => {
  const { client } = await picked();
  const request = new GatewayRequest(client);
  request.headers({});
  request.body('{"prompt":"a"}', false);
  request.write({ request_trailers: {} });
  await request.find((message) => message.request_trailers !== undefined);
  const kinds = request.answers.map(
    (message) => Object.keys(message).filter((key) => key.startsWith("request_"))[0],
  );
  expect(kinds).toEqual(["request_headers", "request_body", "request_trailers"]);
  expect(
    request.answers[1].request_body.response.body_mutation.streamed_response.end_of_stream,
  ).not.toBe(true);
});

test("the answer passes unchanged, with its trailers", async () => {
  const { client } = await picked();
  const request = send(client);
  await request.choice();
  request.answerHead(200);
  request.write({ response_body: { body: Buffer.from("data: 1\n\n") } });
  request.write({ response_trailers: {} });
  await request.find((message) => message.response_trailers !== undefined);
  const piece = request.answers.find((message) => message.response_body !== undefined);
  const { body, end_of_stream: end } = piece.response_body.response.body_mutation.streamed_response;
  expect([body.toString(), end]).toEqual(["data: 1\n\n", false]);
});

test("a list of models comes from a D, without a P", async () => {
  const { client } = await picked();
  const request = new GatewayRequest(client);
  const head = { ":method": "GET", ":path": "/v1/models?x=1", "x-prefiller-host-port": "evil:1" };
  request.headers(head, { end_of_stream: true });
  const { headers, removed, destination } = await request.choice();
  expect(destination).toBe("127.0.0.1:21,127.0.0.1:22");
  expect(headers).not.toHaveProperty("x-prefiller-host-port");
  expect(removed).toEqual(["x-prefiller-host-port"]);
});

test.each(DECODE_ROUTES)(
  "field.md R9: %s goes to a D, without a P, and its body passes unchanged",
  async (path) => {
    const { client } = await picked();
    const request = send(client, { prompt: "a" }, { ":path": path });
    const { headers, destination } = await request.choice();
    expect(destination).toMatch(/^127\.0\.0\.1:2/);
    expect(headers).not.toHaveProperty("x-prefiller-host-port");
    const refused = send(client, { prompt: "a", kv_transfer_params: {} }, { ":path": path });
    expect(await refused.refusal()).toMatchObject({ status: 400 });
  },
);

test("a client cannot choose P: its header is replaced, or removed where D computes alone", async () => {
  const { client } = await picked({ disaggregateAbove: 1000 });
  const forged = { "x-prefiller-host-port": "evil:1", "x-gateway-destination-endpoint": "evil:2" };
  // Only a P answers about the prompt.
  for (const body of [{ prompt: "a".repeat(10_000) }, { prompt: "a", prompt_logprobs: 1 }])
    expect((await send(client, body, forged).choice()).headers).toMatchObject({
      "x-prefiller-host-port": expect.stringMatching(/^127\.0\.0\.1:1[12],127\.0\.0\.1:1[12]$/),
    });
  const short = await send(client, { prompt: "a" }, forged).choice();
  expect(short.headers).not.toHaveProperty("x-prefiller-host-port");
  expect(short.removed).toEqual(["x-prefiller-host-port"]);
  expect(short.headers["x-gateway-destination-endpoint"]).toBe(short.destination);
});

test("headers in which a client names further instances to a sidecar are removed", async () => {
  const { client } = await picked();
  const forged = {
    "x-encoder-hosts-ports": "evil:1",
    "x-data-parallel-host-port": "evil:2",
    "x-kv-cache-source-host-port": "evil:3",
  };
  const { removed, headers } = await send(client, undefined, forged).choice();
  expect(removed).toEqual(Object.keys(forged));
  expect(headers["x-prefiller-host-port"]).toBe("127.0.0.1:11,127.0.0.1:12");
});

test("who has the prompt's start is named to the sidecar: a pool, by exact keys", async () => {
  const pool = createServer((_request, response) => response.end(JSON.stringify(poolContent(3))));
  await once(pool.listen(0, "127.0.0.1"), "listening");
  onTestFinished(() => void pool.close());
  const { port } = pool.address() as AddressInfo;
  const { client, picker } = await picked({ kvSources: { pools: [`127.0.0.1:${port}`] } });
  await expect.poll(() => picker.status().kv_pools[0]).toMatchObject({ blocks: 3, unused: null });
  const forged = { "x-kv-cache-source-host-port": "evil:3" };
  const { headers } = await send(client, { prompt: POOL_PROMPT }, forged).choice();
  expect(headers["x-kv-cache-source-host-port"]).toBe(POOL_PEER);
  const other = await send(client, { prompt: POOL_PROMPT.with(0, 99) }, forged).choice();
  expect(other.removed).toEqual(["x-kv-cache-source-host-port"]);
});

test("a request that cannot be split is refused, or goes to a D alone", async () => {
  const body = { prompt: "a", use_beam_search: true };
  const strict = await picked();
  expect(await send(strict.client, body).refusal()).toMatchObject({
    status: 400,
    error: { code: "KV_REQUEST_INVALID", message: expect.stringContaining("use_beam_search") },
  });
  const lenient = await picked({ unsplittable: "decode-computes" });
  expect((await send(lenient.client, body).choice()).headers).not.toHaveProperty(
    "x-prefiller-host-port",
  );
});

test("the subset hint limits D, and P where it names one", async () => {
  const { client } = await picked();
  const one = await send(client, undefined, {}, subsetHint([D[2] ?? ""])).choice();
  expect([one.destination, one.headers["x-prefiller-host-port"]]).toEqual([
    D[2],
    "127.0.0.1:11,127.0.0.1:12",
  ]);
  const both = await send(client, undefined, {}, subsetHint([D[1] ?? "", P[1] ?? ""])).choice();
  expect([both.destination, both.headers["x-prefiller-host-port"]]).toEqual([D[1], P[1]]);
});

test.each([[[]], [["127.0.0.1:9"]]])(
  "the subset hint %j without a D is answered with 503",
  async (endpoints) => {
    const { client } = await picked();
    expect(await send(client, undefined, {}, subsetHint(endpoints)).refusal()).toMatchObject({
      status: 503,
      error: { code: "KV_PROXY_NO_INSTANCE", message: expect.stringContaining("subset hint") },
    });
  },
);

test("503 names the reason, and no address unless the instances are exposed", async () => {
  const { picker, client } = await picked({ exposeInstances: true });
  for (const url of D) void picker.instances.decode.drain({ url: `http://${url}` });
  const { status, error } = await send(client).refusal();
  expect([status, error.code, error.type]).toEqual([503, "KV_PROXY_NO_INSTANCE", "server_error"]);
  expect(error.message).toContain(
    "no decode instance is available: http://127.0.0.1:21 is draining",
  );
  const hidden = await picked();
  for (const url of P) void hidden.picker.instances.prefill.drain({ url: `http://${url}` });
  const refusal = await send(hidden.client).refusal();
  expect(refusal.error.message).toContain("no prefill instance is available");
  expect(refusal.error.message).not.toContain("127.0.0.1");
});

test("429 with Retry-After while each D has as many requests as it may have", async () => {
  const { client } = await picked({ decoders: D.slice(0, 2), limits: { requestsPerDecode: 1 } });
  const first = send(client);
  const second = send(client);
  await Promise.all([first.choice(), second.choice()]);
  const { status, headers, error } = await send(client).refusal();
  expect([status, headers["retry-after"], error.code]).toEqual([429, "1", "KV_PROXY_OVERLOADED"]);
  first.answer(200);
  await first.ended;
  expect((await send(client).choice()).destination).toBe(D[0]);
});

const containing = (text: string): unknown => expect.stringContaining(text);

test.each([
  ["a path that is not served", { ":path": "/reset_prefix_cache" }, "{}", { status: 404 }],
  ["another method", { ":method": "PUT" }, "{}", { status: 405 }],
  ["text that is not JSON", {}, "{", { status: 400 }],
  [
    "on /v1/messages, in Anthropic's form, text that is not JSON",
    { ":path": "/v1/messages" },
    "{",
    { type: "error", error: { type: "invalid_request_error" } },
  ],
  [
    "a request_id in the body, which vLLM's Responses API takes, of another form than X-Request-Id",
    { ":path": "/v1/responses" },
    '{"input":"a","request_id":"mine,another"}',
    { status: 400, error: { message: containing("request_id") } },
  ],
])("%s is refused", async (_name, headers, body, refusal) => {
  const { client } = await picked();
  expect(await send(client, body, headers).refusal()).toMatchObject(refusal);
});

test.each([
  ['"prompt":"a","kv_transfer_params":{}', "kv_transfer_params"],
  ['"vllm_xargs":{"kv_transfer_params":""}', "vllm_xargs.kv_transfer_params"],
  // The body is passed on as it came, and another parser may take the first one of two.
  ['"kv_transfer_params":{"remote_host":"x"},"kv_transfer_params":null', "kv_transfer_params"],
  ['"vllm_xargs":{"kv_transfer_params":0},"vllm_xargs":{}', "vllm_xargs"],
])(
  "what reaches an engine's connector is refused by name, in a short and in a long body: %s",
  async (members, name) => {
    const { client } = await picked();
    const filler = `"x":"${"a".repeat(300_000)}"`;
    for (const path of ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
      for (const body of [`{${members}}`, `{${members},${filler}}`, `{${filler},${members}}`])
        expect(await send(client, body, { ":path": path }).refusal()).toMatchObject({
          status: 400,
          error: { message: expect.stringContaining(name) },
        });
  },
);

test("a D that answers 500 counts as failed, its P does not; a client that leaves fails nobody", async () => {
  const { picker, client } = await picked();
  await send(client).serve(500);
  const left = send(client);
  await left.choice();
  left.leave();
  await expect.poll(() => picker.status().in_flight).toBe(0);
  const { decoders, prefillers } = picker.status();
  expect(decoders.map(({ failures, in_flight }) => [failures, in_flight])).toEqual([
    [1, 0],
    [0, 0],
    [0, 0],
  ]);
  expect(prefillers.map(({ failures, in_flight }) => [failures, in_flight])).toEqual([
    [0, 0],
    [0, 0],
  ]);
});

/** Sends requests one after another; returns how many the first D got. */
async function sentToFirst(
  client: ReturnType<typeof clientOf>,
  {
    count,
    key,
    answer,
  }: { count: number; key: string; answer: (url: string) => readonly [number, string?] },
): Promise<number> {
  let toFirst = 0;
  for (let at = 0; at < count; at += 1) {
    const request = send(client, undefined, { authorization: key });
    const url = (await request.choice()).destination.split(",")[0] ?? "";
    if (url === D[0]) toFirst += 1;
    const [status, contentType] = answer(url);
    request.answer(status, {}, contentType);
    await request.ended;
  }
  return toFirst;
}

const ALWAYS: readonly (readonly [number, string?])[] = [
  [503],
  [500],
  [307],
  [401],
  [403],
  [429],
  [200, "text/html"],
];

test.each(ALWAYS.map((answer) => ({ answer })))(
  "F3: a D that always answers $answer is ejected: it gets 5 of 40 requests, in place of half",
  async ({ answer }) => {
    const { picker, client } = await picked({ decoders: D.slice(0, 2) });
    // The last one to serve the client is another D.
    await sentToFirst(client, { count: 2, key: "k", answer: () => [200] });
    const toFirst = await sentToFirst(client, {
      count: 40,
      key: "k",
      answer: (url) => (url === D[0] ? answer : [200]),
    });
    expect(toFirst).toBe(5);
    expect(picker.status().decoders.map(({ state, ejections }) => [state, ejections])).toEqual([
      ["ejected", 1],
      ["up", 0],
    ]);
  },
);

test.each([1, 2])(
  "F3: %i of three D answer 503: with a gateway that tries the next one named, 0 of 60 clients fail",
  async (bad) => {
    const { client } = await picked({ fallbacks: 2 });
    const statuses = new Set<number>();
    for (let at = 0; at < 60; at += 1) {
      const request = send(client);
      const named = (await request.choice()).destination.split(",");
      const served = named.find((one) => !D.slice(0, bad).includes(one));
      const status = served === undefined ? 503 : 200;
      statuses.add(status);
      const fields = { "x-gateway-destination-endpoint-served": { stringValue: served } };
      request.answer(status, { metadata_context: { filter_metadata: { "envoy.lb": { fields } } } });
      await request.ended;
    }
    expect(statuses).toEqual(new Set([200]));
  },
);

test("F3: what clients cause ejects no D: wrong keys, requests that are refused, and what fails at each", async () => {
  const { picker, client } = await picked();
  for (const status of [400, 401, 403, 404, 413, 422, 429, 503]) {
    await sentToFirst(client, { count: 1, key: "valid", answer: () => [200] });
    await sentToFirst(client, { count: 20, key: "wrong", answer: () => [status] });
  }
  expect(picker.status().decoders.map(({ state }) => state)).toEqual(["up", "up", "up"]);
});

test("F-low: long paths are shortened in log lines", async () => {
  const lines: string[] = [];
  const record = (event: string, fields: object = {}) =>
    lines.push(JSON.stringify({ event, ...fields }));
  const { client } = await picked({ log: { ...silentLog, info: record, warn: record } });
  const refused = send(client, "{}", { ":path": `/${"x".repeat(20_000)}` });
  await refused.refusal();
  const served = send(client, "{}", {
    ":path": `/v1/models/${"x".repeat(20_000)}`,
    ":method": "GET",
  });
  await served.choice();
  served.answer(200);
  await served.ended;
  await expect.poll(() => lines.filter((line) => line.includes("request-")).length).toBe(2);
  expect(Math.max(...lines.map(({ length }) => length))).toBeLessThan(1_000);
});

test.each([
  [
    "x-gateway-destination-endpoint-served",
    (fields: object) => ({ metadata_context: { filter_metadata: { "envoy.lb": { fields } } } }),
  ],
  [
    "upstream.address",
    (fields: object) => ({ attributes: { "envoy.filters.http.ext_proc": { fields } } }),
  ],
])("a D that the gateway could not use is left out for a while: %s", async (key, message) => {
  const { picker, client } = await picked();
  const request = send(client);
  await request.choice();
  request.answer(200, message({ [key]: { stringValue: D[1] } }));
  await request.ended;
  await expect.poll(() => picker.status().in_flight).toBe(0);
  const states = picker
    .status()
    .decoders.map(({ state, requests, failures }) => [state, requests, failures]);
  expect(states).toEqual([
    ["cooling-down", 1, 1],
    ["up", 1, 0],
    ["up", 0, 0],
  ]);
});

test("a P is busy until the answer begins, a D until it ends", async () => {
  const { picker, client } = await picked({ decoders: D.slice(0, 1), prefillers: P.slice(0, 1) });
  const request = send(client);
  await request.choice();
  const load = () =>
    [...picker.status().prefillers, ...picker.status().decoders].map((each) => each.in_flight);
  expect(load()).toEqual([1, 1]);
  request.answerHead(200);
  await request.find((message) => message.response_headers !== undefined);
  expect(load()).toEqual([0, 1]);
  request.answer(200);
  await request.ended;
  await expect.poll(load).toEqual([0, 0]);
});

test("of a data-parallel D its rank is named, and no other rank is named in its place", async () => {
  const { client } = await picked({
    decoders: ["127.0.0.1:21@1", "127.0.0.1:22"],
    prefillers: ["127.0.0.1:11@2"],
  });
  const { headers, destination } = await send(client).choice();
  expect([destination, headers["x-data-parallel-rank"]]).toEqual(["127.0.0.1:21", "1"]);
  expect(headers["x-prefiller-host-port"]).toBe("127.0.0.1:11@2");
});

test.each([
  [{ protocol_config: { request_body_mode: 2 } }, "request_body_mode is BUFFERED"],
  [
    { protocol_config: { request_body_mode: 4, response_body_mode: 1 } },
    "response_body_mode is STREAMED",
  ],
  [{ observability_mode: true }, "observability_mode is set"],
])("a gateway with %j gets FAILED_PRECONDITION", async (more, why) => {
  const { client } = await picked();
  const request = new GatewayRequest(client);
  request.headers({}, more);
  const { code, details } = await request.ended;
  expect([code, details]).toEqual([9, expect.stringContaining(why)]);
});

test("a decode instance with a name in place of an address is refused", async () => {
  await expect(picked({ decoders: ["d1:8200"] })).rejects.toMatchObject({
    code: "KV_CONFIG_INVALID",
    message: expect.stringContaining("http://d1:8200"),
  });
});
