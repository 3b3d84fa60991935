import type { Instance } from "@kv/fleet";
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
import { expect, test } from "vitest";
import { legsAt } from "../support/releases.js";
import { errorOf, post, runPair, runProxy, upstream } from "../support/set-up.js";

test("an error of the prefill instance keeps its status and body, and no decode instance is asked", async () => {
  const error = { error: { message: "too long", type: "BadRequestError", param: null, code: 400 } };
  const { d, url, proxy } = await runPair({ p: ({ response }) => sendJson(response, error, 400) });
  const response = await post(`${url}/v1/completions`, { prompt: "a" });
  expect([response.status, await response.json()]).toEqual([400, error]);
  expect(d.seen).toHaveLength(0);
  expect(proxy.status().requests.passed_errors).toEqual({ 400: 1 });
  expect(proxy.status().prefillers[0]?.failures).toBe(0);
});

test.each([401, 429, 501])(
  "a %i of the decode instance is passed on, and is not retried",
  async (status) => {
    const p = await upstream(prefillOk);
    const answer = { error: { message: "no" } };
    const ds = [0, 1].map(() =>
      upstream(({ response }) => sendJson(response.setHeader("retry-after", "7"), answer, status)),
    );
    const [d, other] = await Promise.all(ds);
    const { url } = await runProxy({
      prefillers: [p.url],
      decoders: [d?.url ?? "", other?.url ?? ""],
    });
    const response = await post(`${url}/v1/completions`, { prompt: "a" });
    expect([response.status, await response.json(), response.headers.get("retry-after")]).toEqual([
      status,
      answer,
      "7",
    ]);
    expect((d?.seen.length ?? 0) + (other?.seen.length ?? 0)).toBe(1);
  },
);

const loadFailed = { error: { message: "KV load failed", type: "InternalServerError", code: 500 } };

test.each([500, 503])(
  "after a %i of a decode instance, the request begins again with another",
  async (status) => {
    const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
    const failing = await upstream(({ response }) => sendJson(response, loadFailed, status));
    const { url, proxy } = await runProxy({ prefillers: [p.url], decoders: [failing.url, d.url] });
    const response = await post(`${url}/v1/completions`, { prompt: "a" });
    expect([response.status, await response.json()]).toEqual([200, COMPLETION]);
    expect([p, failing, d].map(legsAt)).toEqual([2, 1, 1]);
    // It answered, so it is reachable: its health checks decide whether it gets more requests.
    await expect
      .poll(() => proxy.status().decoders[0])
      .toMatchObject({ failures: 1, available: true, in_flight: 0 });
  },
);

test("after a stream that begins with a failure, the request begins again with another decode instance", async () => {
  const p = await upstream(prefillOk);
  const failing = await upstream(({ response }) => {
    response.writeHead(200, { "content-type": "text/event-stream" });
    response.end(`data: ${JSON.stringify(loadFailed)}\n\ndata: [DONE]\n\n`);
  });
  const d = await upstream(({ response }) => sendStream(response, STREAM));
  const { url } = await runProxy({ prefillers: [p.url], decoders: [failing.url, d.url] });
  const response = await post(`${url}/v1/completions`, { prompt: "a", stream: true });
  expect([response.status, await response.text()]).toEqual([200, STREAM]);
});

test("when two decode instances fail, the second failure is the answer, and no third is tried", async () => {
  const p = await upstream(prefillOk);
  const ds = await Promise.all(
    [0, 1, 2].map(() => upstream(({ response }) => sendJson(response, loadFailed, 500))),
  );
  const { url } = await runProxy({ prefillers: [p.url], decoders: ds.map((d) => d.url) });
  const response = await post(`${url}/v1/completions`, { prompt: "a" });
  expect([response.status, await response.json()]).toEqual([500, loadFailed]);
  expect(ds.map(legsAt)).toEqual([1, 1, 0]);
});

test("the only decode instance fails with the KV of a prefill instance that ended: the request begins again with another one's", async () => {
  const prefill =
    (engine: string): Answer =>
    ({ response }) =>
      sendJson(response, {
        choices: [{}],
        kv_transfer_params: { ...JSON.parse(KV_PARAMS_TEXT), remote_engine_id: engine },
      });
  const [ended, p] = [await upstream(prefill("gone")), await upstream(prefill("e"))];
  const d = await upstream((seen) =>
    JSON.stringify(seen.json.kv_transfer_params).includes("gone")
      ? sendJson(seen.response, loadFailed, 500)
      : decodeOk(seen),
  );
  const createRouting = () => ({
    name: "first",
    choose: (candidates: readonly Instance[]) => candidates[0],
  });
  const { url } = await runProxy({
    createRouting,
    prefillers: [ended.url, p.url],
    decoders: [d.url],
  });
  const response = await post(`${url}/v1/completions`, { prompt: "a" });
  expect([response.status, await response.json()]).toEqual([200, COMPLETION]);
  expect([ended, p, d].map(legsAt)).toEqual([1, 1, 2]);
});

test.each([
  [500, 2],
  [503, 1],
])("a %i of the only decode instance is the answer, after %i tries", async (status, tries) => {
  const { p, d, url, proxy } = await runPair({
    d: ({ response }) => sendJson(response, loadFailed, status),
  });
  const response = await post(`${url}/v1/completions`, { prompt: "a" });
  expect([response.status, await response.json()]).toEqual([status, loadFailed]);
  expect([p, d].map(legsAt)).toEqual([tries, tries]);
  await expect
    .poll(() => proxy.status().decoders[0])
    .toMatchObject({ available: true, in_flight: 0 });
});

test("after a prefill failure another instance is tried; when both fail, the second failure is the answer", async () => {
  const dead = () => upstream(({ response }) => sendJson(response, loadFailed, 500));
  const [b1, b2, p, d] = [
    await dead(),
    await dead(),
    await upstream(prefillOk),
    await upstream(decodeOk),
  ];
  const saved = await runProxy({ prefillers: [b1.url, p.url], decoders: [d.url] });
  expect((await post(`${saved.url}/v1/completions`, { prompt: "a" })).status).toBe(200);
  const lost = await runProxy({ prefillers: [b1.url, b2.url, p.url], decoders: [d.url] });
  const response = await post(`${lost.url}/v1/completions`, { prompt: "a" });
  expect([response.status, await response.json()]).toEqual([500, loadFailed]);
});

test("instances that cannot be reached do not use up the retry", async () => {
  const [gone, d] = [await deadUrl(), await upstream(decodeOk)];
  const breaking = await upstream(({ response }) => void response.destroy());
  const p = await upstream(prefillOk);
  const { url } = await runProxy({ prefillers: [gone, breaking.url, p.url], decoders: [d.url] });
  expect((await post(`${url}/v1/completions`, { prompt: "a" })).status).toBe(200);
});

test.each([
  ["", "\n"],
  [": ping\n\n", "\n"],
  [": ping\r\n\r\n", "\r\n"],
])(
  "a stream that begins (after %j) with an error is answered with the error's code",
  async (before, end) => {
    const { url } = await runPair({
      d: ({ response }) => {
        response.writeHead(200, { "content-type": "text/event-stream" });
        response.write(`${before}data: {"error": {"message": "KV lo`);
        response.end(`ad failed", "code": 500}}${end}${end}data: [DONE]${end}${end}`);
      },
    });
    const response = await post(`${url}/v1/completions`, { prompt: "a", stream: true });
    expect(response.headers.get("content-type")).toBe("application/json");
    expect(await errorOf(response)).toMatchObject({ status: 500, message: "KV load failed" });
  },
);

test.each([
  ["without parameters", '{"choices":[{}],"kv_transfer_params":null}'],
  [
    "with parameters that promise no KV",
    '{"choices":[{}],"kv_transfer_params":{"do_remote_prefill":false}}',
  ],
])("a prefill answer %s is an error, or decode computes by policy", async (_what, body) => {
  const p = await upstream(({ response }) => void response.end(body));
  const d = await upstream(decodeOk);
  const strict = await runProxy({ prefillers: [p.url], decoders: [d.url] });
  expect(await errorOf(await post(`${strict.url}/v1/completions`, { prompt: "a" }))).toMatchObject({
    status: 502,
    code: "KV_PROXY_UPSTREAM_FAILED",
  });
  expect(d.seen).toHaveLength(0);

  const policy = { missingKv: "decode-computes" } as const;
  const lenient = await runProxy({ prefillers: [p.url], decoders: [d.url], policy });
  const response = await post(`${lenient.url}/v1/completions`, { prompt: "a" });
  expect(await response.json()).toEqual(COMPLETION);
  expect(d.seen[0]?.json).toEqual({ prompt: "a" });
});

test.each([
  ["none but the promise", '{"do_remote_prefill":true}'],
  ["blocks that are none", KV_PARAMS_TEXT.replace("[[1,2]]", '"../../etc"')],
  ["a port that is none", KV_PARAMS_TEXT.replace("5600", "1000000000")],
])(
  "parameters that would stop a decode engine (%s) are a 502 and reach none",
  async (_what, params) => {
    // The policy is for a prefill instance that has no KV, not for one whose parameters are invalid.
    const policy = { missingKv: "decode-computes" } as const;
    const { d, url } = await runPair(
      { p: ({ response }) => void response.end(`{"choices":[{}],"kv_transfer_params":${params}}`) },
      { policy },
    );
    const error = await errorOf(await post(`${url}/v1/completions`, { prompt: "a" }));
    expect(error).toMatchObject({ status: 502, code: "KV_PROXY_UPSTREAM_FAILED" });
    expect(error.message).toContain("no decode worker could use: kv_transfer_params: remote_");
    expect(d.seen).toHaveLength(0);
  },
);

const dies: Answer = ({ response }) => void response.destroy();
const fails: Answer = ({ response }) => sendJson(response, loadFailed, 500);

test.each([
  ["the prompt alone", { echo: true, max_tokens: 0 }],
  ["one that cannot be parted", { use_beam_search: true, n: 2 }],
])(
  "an unsplit request (%s) is tried on one other instance, and on no third",
  async (_what, fields) => {
    const two = { ...COMPLETION, choices: [{ index: 0 }, { index: 1 }] };
    for (const failing of [dies, fails]) {
      const [bad1, bad2, good, good2] = [
        await upstream(failing),
        await upstream(failing),
        await upstream(({ response }) => sendJson(response, two)),
        await upstream(({ response }) => sendJson(response, two)),
      ];
      const ask = async (urls: string[]) => {
        const { url } = await runProxy({
          prefillers: urls,
          decoders: urls,
          policy: { unsplittable: "decode-computes" },
        });
        return post(`${url}/v1/completions`, { prompt: "a", ...fields });
      };
      const saved = await ask([bad1.url, good.url]);
      expect([saved.status, await saved.json()]).toEqual([200, two]);
      const lost = await ask([bad1.url, bad2.url, good2.url]);
      expect(lost.status).toBe(failing === fails ? 500 : 502);
      if (failing === fails) expect(await lost.json()).toEqual(loadFailed);
      expect([bad1.seen.length, bad2.seen.length, good.seen.length, good2.seen.length]).toEqual([
        2, 1, 1, 0,
      ]);
    }
  },
);

test("soak: a request that D alone serves is tried on one other instance when its D dies, and on no third", async () => {
  const [bad1, bad2, good] = [await upstream(dies), await upstream(dies), await upstream(decodeOk)];
  const ask = async (decoders: string[]) => {
    const { url } = await runProxy({ prefillers: [bad1.url], decoders });
    return (await post(`${url}/tokenize`, { prompt: "a" })).status;
  };
  expect(await ask([bad1.url, good.url])).toBe(200);
  expect(await ask([bad1.url, bad2.url, good.url])).toBe(502);
});

test("when all decode instances are draining, the answer is 503 with a hint, before anything is computed", async () => {
  for (const mode of ["pull", "push"] as const) {
    const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
    const prefillers = [{ url: p.url, kv: { engineId: "e" } }];
    const { url, proxy } = await runProxy({ mode, prefillers, decoders: [d.url] });
    await proxy.instances.decode.drain({ url: d.url });
    const response = await post(`${url}/v1/completions`, { prompt: "a" });
    const { error } = (await response.json()) as { error: { message: string; hint: string } };
    expect(response.status).toBe(503);
    expect(error.message).toContain("all 1 are draining");
    expect(error.hint).toContain("/instances/add");
    expect(p.seen).toHaveLength(0);
  }
});

test("a request that cannot be split is refused, or served by a decode instance", async () => {
  const p = await upstream(prefillOk);
  const d = await upstream(decodeOk);
  const strict = await runProxy({ prefillers: [p.url], decoders: [d.url] });
  const body = { prompt: "a", use_beam_search: true, n: 2 };
  const refused = await errorOf(await post(`${strict.url}/v1/completions`, body));
  expect(refused).toMatchObject({ status: 400, code: "KV_REQUEST_INVALID" });
  expect(refused.message).toContain("use_beam_search");

  const policy = { unsplittable: "decode-computes" } as const;
  const lenient = await runProxy({ prefillers: [p.url], decoders: [d.url], policy });
  expect((await post(`${lenient.url}/v1/completions`, body)).status).toBe(200);
  expect([p.seen.length, d.seen[0]?.json]).toEqual([0, body]);
});

test.each([
  ["prefill", "with an empty body", ""],
  ["prefill", "not in JSON", "<html>"],
  ["prefill", "with no object", "[]"],
  ["decode", "with an empty body", ""],
  ["decode", "not in JSON", "{"],
  ["decode", "without choices", '{"choices":[]}'],
  ["decode", "with a choice that is none", '{"choices":[null]}'],
  ["decode", "with two choices where one was asked for", '{"choices":[{"index":0},{"index":1}]}'],
])("a %s instance that answers 200 %s fails the request", async (role, _what, body) => {
  const broken = await upstream(({ response }) => void response.end(body));
  const p = await upstream(prefillOk);
  const d = await upstream(decodeOk);
  const prefill = role === "prefill" ? broken.url : p.url;
  const { url } = await runProxy({
    prefillers: [prefill],
    decoders: [role === "decode" ? broken.url : d.url],
  });
  for (const prompt of ["a", ["a", "b"]]) {
    const error = await errorOf(await post(`${url}/v1/completions`, { prompt }));
    expect(error).toMatchObject({ status: 502, code: "KV_PROXY_UPSTREAM_FAILED" });
    expect(error.message).not.toContain("127.0.0.1");
  }
});

test.each(["data: [DONE]\n\n", ": ping\n\ndata: [DONE]\r\n\r\n"])(
  "a stream that only has an end (%j) is a 502, for one prompt and for two",
  async (text) => {
    const { url } = await runPair({ d: ({ response }) => sendStream(response, text) });
    for (const prompt of ["a", ["a", "b"]]) {
      const error = await errorOf(await post(`${url}/v1/completions`, { prompt, stream: true }));
      expect(error).toMatchObject({ status: 502, code: "KV_PROXY_UPSTREAM_FAILED" });
    }
  },
);

test.each([
  ["without a choice", '{"choices":[],"usage":{}}'],
  ["with a choice that is none", '{"choices":[null]}'],
])("a stream %s is a 502, for one prompt and for two", async (_what, data) => {
  const { url } = await runPair({
    d: ({ response }) => sendStream(response, `data: ${data}\n\ndata: [DONE]\n\n`),
  });
  for (const prompt of ["a", ["a", "b"]]) {
    const error = await errorOf(await post(`${url}/v1/completions`, { prompt, stream: true }));
    expect(error).toMatchObject({ status: 502, code: "KV_PROXY_UPSTREAM_FAILED" });
    expect(error.message).toContain("choice");
  }
});

test("two choices in a part's stream fail the request", async () => {
  const text = 'data: {"choices":[{"index":0},{"index":1}]}\n\ndata: [DONE]\n\n';
  const { url } = await runPair({ d: ({ response }) => sendStream(response, text) });
  const error = await errorOf(
    await post(`${url}/v1/completions`, { prompt: ["a", "b"], stream: true }),
  );
  expect(error).toMatchObject({ status: 502, code: "KV_PROXY_UPSTREAM_FAILED" });
});

test("an error event in the middle of a stream passes unchanged, and the request counts as failed", async () => {
  const text =
    'data: {"choices":[{"index":0,"text":"a"}]}\n\ndata: {"error":{"message":"boom","code":500}}\n\ndata: [DONE]\n\n';
  const { url, proxy } = await runPair({ d: ({ response }) => sendStream(response, text) });
  const response = await post(`${url}/v1/completions`, { prompt: "a", stream: true });
  expect(await response.text()).toBe(text);
  await expect
    .poll(() => proxy.status().requests)
    .toMatchObject({ failed: { KV_PROXY_UPSTREAM_FAILED: 1 }, succeeded: 0 });
  expect(proxy.status().decoders[0]).toMatchObject({ failures: 1, available: true, in_flight: 0 });
});

test("an empty stream is a 502", async () => {
  const { url } = await runPair({
    d: ({ response }) => {
      response.writeHead(200, { "content-type": "text/event-stream" });
      response.end();
    },
  });
  const error = await errorOf(await post(`${url}/v1/completions`, { prompt: "a", stream: true }));
  expect(error).toMatchObject({ status: 502, code: "KV_PROXY_UPSTREAM_FAILED" });
});

test("an unreachable instance is skipped on both legs, and used again when it is back", async () => {
  const clock = manualClock();
  const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
  const [deadP, deadD] = [await deadUrl(), await deadUrl()];
  const { url, proxy } = await runProxy({
    prefillers: [deadP, p.url],
    decoders: [deadD, d.url],
    clock,
  });
  for (let at = 0; at < 3; at++) {
    expect((await post(`${url}/v1/completions`, { prompt: "a" })).status).toBe(200);
  }
  // Each instance is tried once, then it cools down.
  expect(proxy.status().prefillers[0]).toMatchObject({
    requests: 1,
    failures: 1,
    available: false,
    in_flight: 0,
  });
  expect(proxy.status().decoders[0]).toMatchObject({
    requests: 1,
    failures: 1,
    available: false,
    in_flight: 0,
  });
  expect(proxy.status().prefillers[0]?.last_error?.message).toContain("ECONNREFUSED");

  clock.advance(1000);
  const back = await upstream(decodeOk, Number(new URL(deadD).port));
  while (back.seen.length === 0)
    expect((await post(`${url}/v1/completions`, { prompt: "a" })).status).toBe(200);
  expect(proxy.status().decoders[0]).toMatchObject({ available: true, consecutive_failures: 0 });
});

test.each([true, false])(
  "when no instance can be reached, the answer is a 502 that names one where exposeInstances is %s, and /health is 503",
  async (exposeInstances) => {
    const p = await deadUrl();
    const d = await upstream(decodeOk);
    const { url } = await runProxy({
      prefillers: [p],
      decoders: [d.url],
      clock: manualClock(),
      exposeInstances,
    });
    const error = await errorOf(await post(`${url}/v1/completions`, { prompt: "a" }));
    expect(error).toMatchObject({ status: 502, code: "KV_PROXY_UPSTREAM_FAILED" });
    expect(error.message).toBe(
      `the prefill instance ${exposeInstances ? `${p} ` : ""}could not be reached (ECONNREFUSED)`,
    );
    expect((await fetch(`${url}/health`)).status).toBe(503);
  },
);

test("a prefill leg that breaks off is retried once", async () => {
  const breaking = () => upstream(({ response }) => void response.destroy());
  const [b1, b2, b3] = [await breaking(), await breaking(), await breaking()];
  const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
  const saved = await runProxy({ prefillers: [b1.url, p.url], decoders: [d.url] });
  expect((await post(`${saved.url}/v1/completions`, { prompt: "a" })).status).toBe(200);

  const lost = await runProxy({ prefillers: [b1.url, b2.url, b3.url], decoders: [d.url] });
  expect((await post(`${lost.url}/v1/completions`, { prompt: "a" })).status).toBe(502);
  expect([b1.seen.length, b2.seen.length, b3.seen.length]).toEqual([2, 1, 0]);
});

test("after a decode leg that breaks off, the request begins again once, with new blocks", async () => {
  const [broken, also] = await Promise.all(
    [0, 1].map(() => upstream(({ response }) => void response.destroy())),
  );
  const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
  const saved = await runProxy({ prefillers: [p.url], decoders: [broken?.url ?? "", d.url] });
  expect((await post(`${saved.url}/v1/completions`, { prompt: "a" })).status).toBe(200);
  expect([p.seen.length, broken?.seen.length, d.seen.length]).toEqual([2, 1, 1]);

  const lost = await runProxy({
    prefillers: [p.url],
    decoders: [broken?.url ?? "", also?.url ?? "", d.url],
  });
  expect((await post(`${lost.url}/v1/completions`, { prompt: "a" })).status).toBe(502);
  expect(d.seen.length).toBe(1);
});

test("an unstreamed answer that breaks off is a 502", async () => {
  const { url } = await runPair({
    d: ({ response }) => {
      response.writeHead(200, { "content-type": "application/json", "content-length": 100 });
      response.write('{"choices":[', () => response.destroy());
    },
  });
  expect((await post(`${url}/v1/completions`, { prompt: "a" })).status).toBe(502);
});

test.each(["breaks off", "ends without [DONE]", "ends without a choice"])(
  "a stream that %s ends in an error event and a broken connection",
  async (how) => {
    const { d, url, proxy } = await runPair({ d: () => {} });
    const asked = post(`${url}/v1/completions`, { prompt: "a", stream: true });
    const { response: decode } = await d.request(0);
    decode.writeHead(200, { "content-type": "text/event-stream" });
    decode.write('data: {"choices":[]}\n\n');
    const response = await asked;
    const reader = response.body?.getReader();
    let text = Buffer.from((await reader?.read())?.value ?? []).toString();
    if (how === "breaks off") decode.destroy();
    else decode.end(how === "ends without [DONE]" ? undefined : "data: [DONE]\n\n");
    const broken = await (async () => {
      try {
        for (let next = await reader?.read(); next?.done === false; next = await reader?.read()) {
          text += Buffer.from(next.value).toString();
        }
        return false;
      } catch {
        return true;
      }
    })();
    expect(broken).toBe(true);
    expect(text).toContain('data: {"error":');
    expect(text).toContain("KV_PROXY_UPSTREAM_FAILED");
    await expect
      .poll(() => proxy.status().requests.failed)
      .toEqual({ KV_PROXY_UPSTREAM_FAILED: 1 });
  },
);

test.each([
  ["the prefill leg", "prefillMs"],
  ["the decode leg's first byte", "firstByteMs"],
] as const)("%s that takes too long is a 504, and the leg is dropped", async (what, timeout) => {
  const clock = manualClock();
  const silent = await upstream(() => {});
  const p = await upstream(prefillOk);
  const prefill = timeout === "prefillMs";
  const urls = { prefillers: [prefill ? silent.url : p.url], decoders: [silent.url] };
  const { url } = await runProxy({ ...urls, clock, timeouts: { [timeout]: 500 } });
  const asked = post(`${url}/v1/completions`, { prompt: "a" });
  const { dropped } = await silent.request(0);
  clock.advance(499);
  clock.advance(1);
  const error = await errorOf(await asked);
  expect(error).toMatchObject({ status: 504, code: "KV_REQUEST_TIMEOUT" });
  expect(error.message).toContain(what);
  await dropped;
});

test("a stream that stalls ends in an error event", async () => {
  const clock = manualClock();
  const { d, url } = await runPair(
    {
      d: ({ response }) => {
        response.writeHead(200, { "content-type": "text/event-stream" });
        response.write("data: {}\n\n");
      },
    },
    { clock, timeouts: { stallMs: 50 } },
  );
  const response = await post(`${url}/v1/completions`, { prompt: "a", stream: true });
  const reader = response.body?.getReader();
  await reader?.read();
  clock.advance(50);
  const last = Buffer.from((await reader?.read())?.value ?? []).toString();
  expect(last).toContain("KV_REQUEST_TIMEOUT");
  await expect(reader?.read()).rejects.toThrow();
  await (await d.request(0)).dropped;
});

test("of two data-parallel ranks on one URL, only the rank that failed counts a failure", async () => {
  const p = await upstream(prefillOk);
  const d = await upstream(({ json, response }) => {
    if (json.prompt === "good") sendJson(response, COMPLETION);
    else {
      // The first bytes of an answer are more than the proxy checks before it merges; then the
      // connection closes.
      response.writeHead(200, { "content-type": "application/json", "content-length": 1000 });
      response.write('{"id":"cmpl-1","choices":[{"text":"', () =>
        setTimeout(() => response.destroy(), 20),
      );
    }
  });
  const { url, proxy } = await runProxy({
    prefillers: [p.url],
    decoders: [`${d.url}@0`, `${d.url}@1`],
    createRouting: () => ({
      name: "by prompt",
      choose: (candidates, { request }) =>
        candidates.at(request?.fields.prompt === "good" ? 0 : -1),
    }),
    limits: { heldAnswerLengthBytes: 10 },
  });
  const answer = await errorOf(await post(`${url}/v1/completions`, { prompt: ["good", "bad"] }));
  expect(answer).toMatchObject({ status: 502, code: "KV_PROXY_UPSTREAM_FAILED" });
  expect(proxy.status().decoders).toMatchObject([
    { data_parallel_rank: 0, failures: 0, available: true },
    { data_parallel_rank: 1, failures: 1, available: false },
  ]);
});

test("field.md R13: a prefill instance that closes a kept connection as a request comes is asked on a new one", async () => {
  const used = new WeakSet<object>();
  const { p, url } = await runPair({
    p: (seen) => {
      const { socket } = seen.response;
      if (socket === null || used.has(socket)) return void socket?.destroy();
      used.add(socket);
      return prefillOk(seen);
    },
  });
  for (let times = 0; times < 4; times += 1)
    expect((await post(`${url}/v1/completions`, { prompt: "a" })).status).toBe(200);
  expect(p.seen).toHaveLength(7);
});
