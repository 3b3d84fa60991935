import { KV_PARAMS_TEXT, prefillOk } from "@kv/testing/http/fake-upstream";
import { recordedSpans } from "@kv/testing/recorded-spans";
import { expect, test } from "vitest";
import { runPair, sends, upstream } from "../support/set-up.js";

const traceId = "0af7651916cd43dd8448eb211c80319c";
const traceparent = `00-${traceId}-b7ad6b7169203331-01`;

test("each leg has a span in the client's trace, and its instance gets that span as parent", async () => {
  const { tracer, spans } = recordedSpans();
  const { p, d, ask } = await runPair({}, { tracer });
  await ask({}, { headers: { traceparent } });
  await expect
    .poll(() => spans().map(({ name }) => name))
    .toEqual(["kv_proxy.prefill", "kv_proxy.decode", "kv_proxy.request"]);
  const [prefill, decode, request] = spans();
  expect([prefill?.parentSpanId, decode?.parentSpanId, request?.parentSpanId]).toEqual([
    request?.spanId,
    request?.spanId,
    "b7ad6b7169203331",
  ]);
  for (const [span, instance] of [
    [prefill, p],
    [decode, d],
  ] as const) {
    expect(span?.traceId).toBe(traceId);
    expect(span?.attributes).toMatchObject({
      "server.address": instance.url,
      "http.response.status_code": 200,
    });
    expect(instance.seen[0]?.headers.traceparent).toBe(`00-${traceId}-${span?.spanId}-01`);
  }
});

test("a leg that fails ends its span with the error's code", async () => {
  const { tracer, spans } = recordedSpans();
  const { ask } = await runPair({ d: sends(500, { error: {} }) }, { tracer });
  await ask();
  await expect
    .poll(() => spans().find(({ name }) => name === "kv_proxy.decode")?.attributes)
    .toMatchObject({ "error.type": "KV_PROXY_UPSTREAM_FAILED" });
  expect(new Set(spans().map((span) => span.traceId)).size).toBe(1);
});

test("a client that does not sample its trace gets no spans, and its headers pass unchanged", async () => {
  const { tracer, spans } = recordedSpans();
  const { p, d, ask } = await runPair({}, { tracer });
  const unsampled = `00-${traceId}-b7ad6b7169203331-00`;
  await ask({}, { headers: { traceparent: unsampled } });
  for (const { seen } of [p, d]) expect(seen[0]?.headers.traceparent).toBe(unsampled);
  expect(spans()).toEqual([]);
});

test("the inputs and the reason of the rule about one leg or two are on the spans of all legs", async () => {
  const { tracer, spans: all } = recordedSpans();
  const usage = { prompt_tokens: 20, prompt_tokens_details: { cached_tokens: 4 } };
  const { ask } = await runPair(
    { p: sends(200, { choices: [], usage, kv_transfer_params: JSON.parse(KV_PARAMS_TEXT) }) },
    { disaggregateAbove: 10, tracer },
  );
  const prompts = [
    { length: 20, reason: "long-suffix", legs: ["kv_proxy.prefill", "kv_proxy.decode"] },
    { length: 5, reason: "short-suffix", legs: ["kv_proxy.decode"] },
  ];
  for (const [at, { length, reason, legs }] of prompts.entries()) {
    const before = all().length;
    await ask({ prompt: Array.from({ length }, (_, id) => id) });
    await expect.poll(() => all().length).toBe(before + legs.length + 1);
    const spans = all()
      .slice(before)
      .filter(({ name }) => name !== "kv_proxy.request");
    expect(spans.map(({ name }) => name)).toEqual(legs);
    for (const { attributes } of spans) {
      expect(attributes).toMatchObject({
        "kv.disaggregation.reason": reason,
        "kv.disaggregation.prompt_tokens": length,
        "kv.disaggregation.decode_cached_tokens": 0,
        "kv.disaggregation.decode_in_flight": 0,
      });
      // What prefill costs is measured by the first leg.
      const measured = ["kv.disaggregation.prefill_wait_ms", "kv.disaggregation.decode_compute_ms"];
      for (const name of measured)
        expect(typeof attributes[name]).toBe(at === 0 ? "undefined" : "number");
      const share = attributes["kv.disaggregation.decode_prompt_share"];
      expect(at === 0 ? share === 0 : Number(share) > 0).toBe(true);
    }
    if (at === 0) expect(spans[0]?.attributes["kv.cached_tokens"]).toBe(4);
  }
});

test("an instance that is a data-parallel rank overrides the client's rank", async () => {
  const p = await upstream(prefillOk);
  const { ask, d } = await runPair({}, { prefillers: [`${p.url}@1`] });
  await ask({}, { headers: { "x-data-parallel-rank": "3" } });
  expect([p, d].map(({ seen }) => seen[0]?.headers["x-data-parallel-rank"])).toEqual(["1", "3"]);
});
