import { expect, test } from "vitest";
import type { ProxyOptions } from "../../src/index.js";
import { errorOf, post, runPair } from "../support/set-up.js";

const SIDECAR: ProxyOptions = { sidecar: { allow: ["127.0.0.0/8"] }, prefillers: [] };
const ROUTES = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"];
const ASKS = { prompt: "a", input: "a", messages: [{ role: "user", content: "a" }] };

/** Each way of a request through a proxy, by the settings and the members that choose it. */
const FLOWS: readonly (readonly [string, ProxyOptions, object])[] = [
  ["two legs, pull", {}, {}],
  ["two legs, push", { mode: "push" }, {}],
  ["several prompts", {}, { prompt: ["a", "b"], n: 2 }],
  ["the prompt alone", {}, { echo: true, max_tokens: 0 }],
  ["--disaggregate-above", { disaggregateAbove: 1000 }, {}],
  [
    "--unsplittable decode-computes",
    { policy: { unsplittable: "decode-computes" } },
    { use_beam_search: true },
  ],
  ["a sidecar without its header", SIDECAR, {}],
  ["a sidecar with its header", SIDECAR, { named: true }],
];

test.each(FLOWS)(
  "vLLM's xargs are no way to a connector: %s",
  async (_, settings, given: { named?: boolean }) => {
    const { named, ...more } = given;
    const { ask, p, d, url } = await runPair({}, settings);
    const headers = named === true ? { "x-prefiller-host-port": new URL(p.url).host } : {};
    for (const path of ROUTES) {
      for (const value of ["", "x", 0, [], { remote_host: "x" }]) {
        const body = { ...ASKS, max_tokens: 4, ...more, vllm_xargs: { kv_transfer_params: value } };
        const refused = await errorOf(await post(url + path, body, { headers }));
        expect(refused).toMatchObject({ status: 400, code: "KV_REQUEST_INVALID" });
        expect(refused.message).toContain("vllm_xargs.kv_transfer_params");
      }
      for (const name of ["kv_transfer_params", "ec_transfer_params", "kv_hints"]) {
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
    expect((await ask(fine, { headers })).status).toBe(200);
  },
);

test("what a sidecar passes on to its D has no way to a connector either", async () => {
  const { d, url } = await runPair({}, SIDECAR);
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
