import {
  type Answer,
  COMPLETION,
  deadUrl,
  decodeOk,
  KV_PARAMS_TEXT,
  prefillOk,
  STREAM,
  sendJson,
  sendStream,
} from "@kv/testing/http/fake-upstream";
import { manualClock } from "@kv/testing/manual-clock";
import { recordedLog } from "@kv/testing/recorded-log";
import { afterAll, beforeAll, describe, expect, test, vi } from "vitest";
import { Generation } from "../../src/flow/generation.js";
import type { RequestRecord } from "../../src/telemetry/request-record.js";
import { isRelease, legsAt } from "../support/releases.js";
import {
  breaks,
  errorOf,
  FIRST,
  post,
  runFleet,
  runPair,
  runProxy,
  sends,
  UPSTREAM_FAILED,
  upstream,
  upstreams,
} from "../support/set-up.js";

// What the proxy does next does not depend on a request's record: this one has no leg that ran, and
// has those that did not.
const { answer } = Generation.prototype;
beforeAll(() => {
  const get = (record: RequestRecord, key: string) => {
    const value = Reflect.get(record, key);
    if (!/(^prefill|^decode|StartedAtMs|^restarts)$/.test(key)) return value;
    return value === undefined ? 5 : undefined;
  };
  vi.spyOn(Generation.prototype, "answer").mockImplementation(function (
    this: Generation,
    client,
    ...rest
  ) {
    Object.assign(client, { record: new Proxy(client.record, { get }) });
    return answer.call(this, client, ...rest);
  });
});
afterAll(() => vi.restoreAllMocks());

const loadFailed = { error: { message: "KV load failed", type: "InternalServerError", code: 500 } };
const fails = sends(500, loadFailed);
const answerTo = async (asked: Promise<Response>) => {
  const response = await asked;
  return [response.status, await response.json()];
};
/** Waits, as a D whose P has not written, unless the blocks of a P are named. */
const decodeOfKv: Answer = (seen) => {
  const params = seen.json.kv_transfer_params as { remote_block_ids?: unknown };
  if (params.remote_block_ids !== undefined) return decodeOk(seen);
};
const prefillOf =
  (engine: string): Answer =>
  ({ response }) =>
    sendJson(response, {
      choices: [{}],
      kv_transfer_params: { ...JSON.parse(KV_PARAMS_TEXT), remote_engine_id: engine },
    });

describe.each(["pull", "push"] as const)("%s", (mode) => {
  test("an error of the prefill instance keeps its status and body, and no decode instance answers", async () => {
    const error = { error: { message: "too long", type: "BadRequestError", param: null } };
    const { ask, d, proxy } = await runFleet([sends(400, error)], [() => {}], { mode });
    expect(await answerTo(ask())).toEqual([400, error]);
    if (mode === "push") await (await d[0].request(0)).dropped;
    else expect(d[0].seen).toEqual([]);
    expect(proxy.status().requests.passed_errors).toEqual({ 400: 1 });
    expect(proxy.status().prefillers[0]?.failures).toBe(0);
  });

  test.each([
    ["fails", 500, fails],
    ["breaks off", 502, breaks],
    ["is busy", 200, sends(503)],
  ])(
    "after a decode instance that %s, the request begins again with another; after two, the client gets %i",
    async (_what, status, how) => {
      const { ask, p, d, proxy } = await runFleet([prefillOk], [how, decodeOk], { mode, ...FIRST });
      expect(await answerTo(ask())).toEqual([200, COMPLETION]);
      expect([...p, ...d].map(legsAt)).toEqual([2, 1, 1]);
      // The prompt was computed again: no decode leg uses the blocks of the first prefill leg.
      const [before, after] = d.map(({ seen }) => seen.find((one) => !isRelease(one)));
      expect(after?.json.kv_transfer_params).toHaveProperty("remote_block_ids");
      const ids = new Set([before, after].map((seen) => seen?.headers["x-request-id"]));
      expect(ids.size).toBe(mode === "push" ? 2 : 1);
      // One that has answered is reachable: its health checks decide whether it gets more requests.
      const blamed = { failures: 1, available: how !== breaks, in_flight: 0 };
      await expect.poll(() => proxy.status().decoders[0]).toMatchObject(blamed);
      await expect.poll(() => proxy.status().prefillers[0]?.in_flight).toBe(0);

      const lost = await runFleet([prefillOk], [how, how, decodeOk], { mode, ...FIRST });
      const [got, body] = await answerTo(lost.ask());
      expect(got).toBe(status);
      if (how === fails) expect(body).toEqual(loadFailed);
      expect(lost.d.map(legsAt)).toEqual([1, 1, status === 200 ? 1 : 0]);
    },
  );

  test("the only decode instance fails with the KV of a prefill instance that ended: the request begins again with another one's", async () => {
    const [ended, p, d] = await upstreams(prefillOf("gone"), prefillOf("e"), (seen) =>
      JSON.stringify(seen.json.kv_transfer_params).includes("gone") ? fails(seen) : decodeOk(seen),
    );
    const { ask } = await runProxy({
      mode,
      ...FIRST,
      prefillers: [
        { url: ended.url, kv: { engineId: "gone" } },
        { url: p.url, kv: { engineId: "e" } },
      ],
      decoders: [d.url],
    });
    expect(await answerTo(ask())).toEqual([200, COMPLETION]);
    expect([ended, p, d].map(legsAt)).toEqual([1, 1, 2]);
  });

  test.each([
    [500, 2],
    [503, 2],
    [501, 1],
  ])("a %i of the only decode instance is the answer, after %i tries", async (status, tries) => {
    const { ask, p, d, proxy } = await runFleet([prefillOk], [sends(status, loadFailed)], { mode });
    expect(await answerTo(ask())).toEqual([status, loadFailed]);
    expect([...p, ...d].map(legsAt)).toEqual([tries, tries]);
    const well = { available: true, in_flight: 0 };
    await expect.poll(() => proxy.status().decoders[0]).toMatchObject(well);
  });

  test.each([
    ["fails", 500, fails],
    ["breaks off", 502, breaks],
  ])(
    "after a prefill instance that %s, another is tried; after two, the client gets %i",
    async (_what, status, how) => {
      const saved = await runFleet([how, prefillOk], [decodeOfKv], { mode, ...FIRST });
      expect(await answerTo(saved.ask())).toEqual([200, COMPLETION]);
      const lost = await runFleet([how, how, prefillOk], [decodeOfKv], { mode, ...FIRST });
      const [got, body] = await answerTo(lost.ask());
      expect(got).toBe(status);
      if (how === fails) expect(body).toEqual(loadFailed);
      expect(lost.p.map(({ seen }) => seen.length)).toEqual([1, 1, 0]);
      await expect.poll(() => lost.proxy.status().decoders[0]?.in_flight).toBe(0);
    },
  );

  test("a stream that has begun is never retried", async () => {
    const dies: Answer = ({ response }) => {
      response.writeHead(200, { "content-type": "text/event-stream" });
      response.write('data: {"choices":[{}]}\n\n', () => setImmediate(() => response.destroy()));
    };
    const { ask, p, d } = await runFleet([prefillOk], [dies, decodeOk], { mode, ...FIRST });
    await expect((await ask({ stream: true })).text()).rejects.toThrow();
    expect([...p, ...d].map(({ seen }) => seen.length)).toEqual([1, 1, 0]);
  });

  test("when all decode instances are draining, the answer is 503 with a hint, before anything is computed", async () => {
    const { ask, p, d, proxy } = await runFleet([prefillOk], [decodeOk], { mode });
    await proxy.instances.decode.drain({ url: d[0].url });
    const { status, message, hint } = await errorOf(await ask());
    expect([status, message, hint]).toEqual([
      503,
      expect.stringContaining("all 1 are draining"),
      expect.stringContaining("/instances/add"),
    ]);
    expect(p[0].seen).toEqual([]);
  });
});

test.each([
  [501, 1],
  [401, 2],
  [429, 2],
])("a %i that all decode instances answer is passed on, after %i tries", async (status, tries) => {
  const answered: Answer = (seen) => {
    seen.response.setHeader("retry-after", "7");
    return sends(status)(seen);
  };
  const { ask, d, proxy } = await runFleet([prefillOk], [answered, answered]);
  const response = await ask();
  expect([response.status, await response.json(), response.headers.get("retry-after")]).toEqual([
    status,
    { error: { message: "no" } },
    "7",
  ]);
  expect(legsAt(d[0]) + legsAt(d[1])).toBe(tries);
  const well = { failures: 0, in_flight: 0 };
  await expect.poll(() => proxy.status().decoders).toMatchObject([well, well]);
});

test("after a stream that begins with a failure, the request begins again with another decode instance", async () => {
  const { ask } = await runFleet(
    [prefillOk],
    [
      ({ response }) =>
        sendStream(response, `data: ${JSON.stringify(loadFailed)}\n\ndata: [DONE]\n\n`),
      ({ response }) => sendStream(response, STREAM),
    ],
  );
  const response = await ask({ stream: true });
  expect([response.status, await response.text()]).toEqual([200, STREAM]);
});

test("instances that cannot be reached do not use up the retry", async () => {
  const [broken, p] = await upstreams(breaks, prefillOk);
  const { ask } = await runPair({}, { prefillers: [await deadUrl(), broken.url, p.url] });
  expect((await ask()).status).toBe(200);
});

test.each([
  ["without parameters", "null"],
  ["with parameters that promise no KV", '{"do_remote_prefill":false}'],
])("a prefill answer %s is an error, or decode computes by policy", async (_what, params) => {
  const answers: Answer = ({ response }) =>
    void response.end(`{"choices":[{}],"kv_transfer_params":${params}}`);
  const strict = await runPair({ p: answers });
  expect(await errorOf(await strict.ask())).toMatchObject(UPSTREAM_FAILED);
  expect(strict.d.seen).toHaveLength(0);

  const lenient = await runPair({ p: answers }, { policy: { missingKv: "decode-computes" } });
  expect(await answerTo(lenient.ask())).toEqual([200, COMPLETION]);
  expect(lenient.d.seen[0]?.json).toEqual({ prompt: "a" });
});

test.each([
  ["none but the promise", '{"do_remote_prefill":true}'],
  ["blocks that are none", KV_PARAMS_TEXT.replace("[[1,2]]", '"../../etc"')],
  ["a port that is none", KV_PARAMS_TEXT.replace("5600", "1000000000")],
])(
  "parameters that would stop a decode engine (%s) are a 502 and reach none",
  async (_what, params) => {
    // The policy is for a prefill instance that has no KV, not for one whose parameters are invalid.
    const { ask, d } = await runPair(
      { p: ({ response }) => void response.end(`{"choices":[{}],"kv_transfer_params":${params}}`) },
      { policy: { missingKv: "decode-computes" } },
    );
    const error = await errorOf(await ask());
    expect(error).toMatchObject(UPSTREAM_FAILED);
    expect(error.message).toContain("no decode worker could use: kv_transfer_params: remote_");
    expect(d.seen).toHaveLength(0);
  },
);

test.each([
  ["the prompt alone", { echo: true, max_tokens: 0 }],
  ["one that cannot be parted", { use_beam_search: true, n: 2 }],
])(
  "an unsplit request (%s) is tried on one other instance, and on no third",
  async (_what, fields) => {
    const two = { ...COMPLETION, choices: [{ index: 0 }, { index: 1 }] };
    const works = sends(200, two);
    for (const failing of [breaks, fails]) {
      const asked = async (...answers: Answer[]) => {
        const urls = (await upstreams(...answers)).map(({ url }) => url);
        const policy = { unsplittable: "decode-computes" } as const;
        const { ask } = await runProxy({ prefillers: urls, decoders: urls, policy });
        return answerTo(ask(fields));
      };
      expect(await asked(failing, works)).toEqual([200, two]);
      const [status, body] = await asked(failing, failing, works);
      expect(status).toBe(failing === fails ? 500 : 502);
      if (failing === fails) expect(body).toEqual(loadFailed);
    }
  },
);

test("soak: a request that D alone serves is tried on one other instance when its D dies, and on no third", async () => {
  for (const [ds, status] of [
    [[breaks, decodeOk], 200],
    [[breaks, breaks, decodeOk], 502],
  ] as const) {
    const { url } = await runFleet([prefillOk], ds);
    expect((await post(`${url}/tokenize`, { prompt: "a" })).status).toBe(status);
  }
});

test("a request that cannot be split is refused, or served by a decode instance", async () => {
  const body = { use_beam_search: true, n: 2 };
  const strict = await runPair();
  const refused = await errorOf(await strict.ask(body));
  expect(refused).toMatchObject({ status: 400, code: "KV_REQUEST_INVALID" });
  expect(refused.message).toContain("use_beam_search");
  const { ask, p, d } = await runPair({}, { policy: { unsplittable: "decode-computes" } });
  expect((await ask(body)).status).toBe(200);
  expect([p.seen.length, d.seen[0]?.json]).toEqual([0, { prompt: "a", ...body }]);
});

const PROMPTS = ["a", ["a", "b"]] as const;

test.each([
  ["prefill", "with an empty body", ""],
  ["prefill", "not in JSON", "<html>"],
  ["prefill", "with no object", "[]"],
  ["decode", "with an empty body", ""],
  ["decode", "not in JSON", "{"],
  ["decode", "without choices", '{"choices":[]}'],
  ["decode", "with a choice that is none", '{"choices":[null]}'],
  ["decode", "with two choices where one was asked for", '{"choices":[{"index":0},{"index":1}]}'],
])(
  "a %s instance that answers 200 %s fails the request, also one for a stream",
  async (role, _what, body) => {
    const broken: Answer = ({ response }) => void response.end(body);
    const { ask } = await runPair(role === "prefill" ? { p: broken } : { d: broken });
    for (const prompt of PROMPTS)
      for (const stream of [false, true]) {
        const error = await errorOf(await ask({ prompt, stream }));
        expect(error).toMatchObject(UPSTREAM_FAILED);
        expect(error.message).not.toContain("127.0.0.1");
      }
  },
);

test.each([
  ["an empty stream", ""],
  ["a stream that only has an end", "data: [DONE]\n\n"],
  ["a stream that only has a comment and an end", ": ping\n\ndata: [DONE]\r\n\r\n"],
  ["a stream without a choice", 'data: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n'],
  ["a stream with a choice that is none", 'data: {"choices":[null]}\n\ndata: [DONE]\n\n'],
])("%s is a 502, for one prompt and for two", async (_what, text) => {
  const { ask } = await runPair({ d: ({ response }) => sendStream(response, text) });
  for (const prompt of PROMPTS)
    expect(await errorOf(await ask({ prompt, stream: true }))).toMatchObject(UPSTREAM_FAILED);
});

const event = (...indices: number[]) =>
  `data: ${JSON.stringify({ choices: indices.map((index) => ({ index, text: "x" })) })}\n\n`;

test.each([
  ["with another index", false, '{"choices":[{"index":7,"text":"x"}]}'],
  ["with another index in a stream", true, event(7) + STREAM],
  ["beside the one of a stream", true, event(0, 7) + STREAM],
  ["after the last event", true, STREAM + event(7)],
])("a choice %s fails the request, for one prompt and for two", async (_what, stream, text) => {
  const { ask, proxy } = await runPair({
    d: ({ response }) => (stream ? sendStream(response, text) : void response.end(text)),
  });
  for (const prompt of PROMPTS) {
    const response = await ask({ prompt, stream });
    expect(await response.text().catch(() => "cut off")).not.toContain('"index":7');
  }
  await expect.poll(() => proxy.status().requests.failed).toEqual({ KV_PROXY_UPSTREAM_FAILED: 2 });
});

test("an error event in the middle of a stream passes unchanged, and the request counts as failed", async () => {
  const text = `${event(0)}data: {"error":{"message":"boom","code":500}}\n\ndata: [DONE]\n\n`;
  const { ask, proxy } = await runPair({ d: ({ response }) => sendStream(response, text) });
  expect(await (await ask({ stream: true })).text()).toBe(text);
  await expect
    .poll(() => proxy.status().requests)
    .toMatchObject({ failed: { KV_PROXY_UPSTREAM_FAILED: 1 }, succeeded: 0 });
  expect(proxy.status().decoders[0]).toMatchObject({ failures: 1, available: true, in_flight: 0 });
});

test("an unreachable instance is skipped on both legs, and used again when it is back", async () => {
  const clock = manualClock();
  const [p, d] = await upstreams(prefillOk, decodeOk);
  const [deadP, deadD] = [await deadUrl(), await deadUrl()];
  const { log, logged } = recordedLog();
  const instances = { prefillers: [deadP, p.url], decoders: [`${deadD}@7`, d.url] };
  const { ask, proxy } = await runProxy({ ...instances, clock, log });
  for (let at = 0; at < 3; at++) expect((await ask()).status).toBe(200);
  // Each instance is tried once, then it cools down.
  const [skipped, too] = [proxy.status().prefillers[0], proxy.status().decoders[0]];
  for (const one of [skipped, too])
    expect(one).toMatchObject({ requests: 1, failures: 1, available: false, in_flight: 0 });
  expect(skipped?.last_error?.message).toContain("ECONNREFUSED");
  const blamed = logged("leg-failed").map(({ instance }) => instance);
  expect(blamed).toEqual([deadP, `${deadD}@7`]);

  clock.advance(1000);
  const back = await upstream(decodeOk, Number(new URL(deadD).port));
  while (back.seen.length === 0) expect((await ask()).status).toBe(200);
  expect(proxy.status().decoders[0]).toMatchObject({ available: true, consecutive_failures: 0 });
});

test.each([true, false])(
  "when no instance can be reached, the answer is a 502 that names one where exposeInstances is %s, and /health is 503",
  async (exposeInstances) => {
    const p = await deadUrl();
    const { ask, url } = await runPair(
      {},
      { prefillers: [p], clock: manualClock(), exposeInstances },
    );
    const error = await errorOf(await ask());
    expect(error).toMatchObject(UPSTREAM_FAILED);
    expect(error.message).toBe(
      `the prefill instance ${exposeInstances ? `${p} ` : ""}could not be reached (ECONNREFUSED)`,
    );
    expect((await fetch(`${url}/health`)).status).toBe(503);
  },
);

test.each(["breaks off", "ends without [DONE]", "ends without a choice", "stalls"])(
  "a stream that %s ends in an error event and a broken connection",
  async (how) => {
    const clock = manualClock();
    const options = { clock, timeouts: { stallMs: 50 } };
    const { ask, d, proxy } = await runPair({ d: () => {} }, options);
    const asked = ask({ stream: true });
    const { response: decode, dropped } = await d.request(0);
    decode.writeHead(200, { "content-type": "text/event-stream" });
    decode.write('data: {"choices":[]}\n\n');
    const reader = (await asked).body?.getReader();
    let text = Buffer.from((await reader?.read())?.value ?? []).toString();
    if (how === "stalls") clock.advance(50);
    else if (how === "breaks off") decode.destroy();
    else decode.end(how === "ends without [DONE]" ? undefined : "data: [DONE]\n\n");
    const reading = async () => {
      for (let next = await reader?.read(); next?.done === false; next = await reader?.read())
        text += Buffer.from(next.value).toString();
    };
    await expect(reading()).rejects.toThrow();
    const code = how === "stalls" ? "KV_REQUEST_TIMEOUT" : "KV_PROXY_UPSTREAM_FAILED";
    expect(text).toContain('data: {"error":');
    expect(text).toContain(code);
    await expect.poll(() => proxy.status().requests.failed).toEqual({ [code]: 1 });
    if (how === "stalls") await dropped;
  },
);

test.each([
  ["the prefill leg", "prefillMs"],
  ["the decode leg's first byte", "firstByteMs"],
] as const)("%s that takes too long is a 504, and the leg is dropped", async (what, timeout) => {
  const clock = manualClock();
  const silent = timeout === "prefillMs" ? "p" : "d";
  const running = await runPair({ [silent]: () => {} }, { clock, timeouts: { [timeout]: 500 } });
  const asked = running.ask();
  const { dropped } = await running[silent].request(0);
  clock.advance(499);
  clock.advance(1);
  const error = await errorOf(await asked);
  expect(error).toMatchObject({ status: 504, code: "KV_REQUEST_TIMEOUT" });
  expect(error.message).toContain(what);
  await dropped;
});

test("of two data-parallel ranks on one URL, only the rank that failed counts a failure", async () => {
  const [p, d] = await upstreams(prefillOk, (seen) => {
    if (seen.json.prompt === "good") return decodeOk(seen);
    // The first bytes of an answer are more than the proxy checks before it merges; then the
    // connection closes.
    const { response } = seen;
    response.writeHead(200, { "content-type": "application/json", "content-length": 1000 });
    response.write('{"id":"cmpl-1","choices":[{"text":"', () =>
      setTimeout(() => response.destroy(), 20),
    );
  });
  const { ask, proxy } = await runProxy({
    prefillers: [p.url],
    decoders: [`${d.url}@0`, `${d.url}@1`],
    createRouting: () => ({
      name: "by prompt",
      choose: (candidates, { request }) =>
        candidates.at(request?.fields.prompt === "good" ? 0 : -1),
    }),
    limits: { heldAnswerLengthBytes: 10 },
  });
  expect(await errorOf(await ask({ prompt: ["good", "bad"] }))).toMatchObject(UPSTREAM_FAILED);
  const well = { failures: 0, consecutive_failures: 0, last_error: null, state: "up" };
  expect(proxy.status().decoders).toMatchObject([
    { data_parallel_rank: 0, available: true, ...well },
    { data_parallel_rank: 1, failures: 1, available: false },
  ]);
});
