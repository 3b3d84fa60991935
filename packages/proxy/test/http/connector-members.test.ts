import { decodeOk, type FakeUpstream, prefillOk } from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import { errorOf, post, runPair, runProxy, upstream } from "../support/set-up.js";

type Settings = Parameters<typeof runProxy>[0];

const LOOPBACK = { sidecar: { allow: ["127.0.0.0/8"] } };
const ROUTES = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"];
const ASKS = { prompt: "a", input: "a", messages: [{ role: "user", content: "a" }] };

/** Each way of a request through a proxy, by the settings and the members that choose it. */
const FLOWS: readonly (readonly [
  string,
  (p: FakeUpstream, d: FakeUpstream) => Settings,
  object,
])[] = [
  ["two legs, pull", (p, d) => ({ prefillers: [p.url], decoders: [d.url] }), {}],
  ["two legs, push", (p, d) => ({ mode: "push", prefillers: [p.url], decoders: [d.url] }), {}],
  [
    "several prompts",
    (p, d) => ({ prefillers: [p.url], decoders: [d.url] }),
    { prompt: ["a", "b"], n: 2 },
  ],
  [
    "the prompt alone",
    (p, d) => ({ prefillers: [p.url], decoders: [d.url] }),
    { echo: true, max_tokens: 0 },
  ],
  [
    "--disaggregate-above",
    (p, d) => ({ prefillers: [p.url], decoders: [d.url], disaggregateAbove: 1000 }),
    {},
  ],
  [
    "--unsplittable decode-computes",
    (p, d) => ({
      prefillers: [p.url],
      decoders: [d.url],
      policy: { unsplittable: "decode-computes" },
    }),
    { use_beam_search: true },
  ],
  ["a sidecar without its header", (_, d) => ({ decoders: [d.url], ...LOOPBACK }), {}],
  ["a sidecar with its header", (_, d) => ({ decoders: [d.url], ...LOOPBACK }), { named: true }],
];

test.each(FLOWS)(
  "vLLM's xargs are no way to a connector: %s",
  async (_, settings, {
    named,
    ...more
  }: {
    named?: boolean;
  }) => {
    const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
    const { url } = await runProxy(settings(p, d));
    const headers = named === true ? { "x-prefiller-host-port": new URL(p.url).host } : {};
    for (const path of ROUTES) {
      for (const value of ["", "x", 0, [], { remote_host: "x" }]) {
        const body = { ...ASKS, max_tokens: 4, ...more, vllm_xargs: { kv_transfer_params: value } };
        const refused = await errorOf(await post(url + path, body, { headers }));
        expect(refused).toMatchObject({ status: 400, code: "KV_REQUEST_INVALID" });
        expect(refused.message).toContain("vllm_xargs.kv_transfer_params");
      }
      for (const name of ["ec_transfer_params", "kv_hints"]) {
        const refused = await errorOf(
          await post(url + path, { ...ASKS, ...more, [name]: {} }, { headers }),
        );
        expect([refused.status, refused.message]).toEqual([400, expect.stringContaining(name)]);
      }
    }
    expect([p.seen, d.seen]).toEqual([[], []]);
    const fine = {
      ...ASKS,
      max_tokens: 4,
      ...more,
      vllm_xargs: { ngram_size: 3 },
      kv_transfer_params: null,
    };
    expect((await post(`${url}/v1/completions`, fine, { headers })).status).toBe(200);
  },
);

test("what a sidecar passes on to its D has no way to a connector either", async () => {
  const d = await upstream(decodeOk);
  const { url } = await runProxy({ decoders: [d.url], ...LOOPBACK });
  for (const path of ["/tokenize", ...ROUTES.map((route) => `${route}/render`)])
    for (const members of [
      { kv_transfer_params: {} },
      { vllm_xargs: { kv_transfer_params: "" } },
      { ec_transfer_params: "x" },
    ])
      expect(await errorOf(await post(url + path, { ...ASKS, ...members }))).toMatchObject({
        status: 400,
      });
  expect(d.seen).toEqual([]);
});

test("a request_id in the body, which vLLM's Responses API takes, has the form of X-Request-Id", async () => {
  const { p, d, url } = await runPair();
  for (const request_id of ["a,b", "a b", "", "é", "x".repeat(129), 7, {}]) {
    const refused = await errorOf(await post(`${url}/v1/responses`, { input: "a", request_id }));
    expect([refused.status, refused.message]).toEqual([400, expect.stringContaining("request_id")]);
  }
  expect([p.seen, d.seen]).toEqual([[], []]);
});
