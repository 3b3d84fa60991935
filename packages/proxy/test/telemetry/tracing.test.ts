import { context, propagation, trace } from "@opentelemetry/api";
import { W3CTraceContextPropagator } from "@opentelemetry/core";
import {
  BasicTracerProvider,
  InMemorySpanExporter,
  SimpleSpanProcessor,
} from "@opentelemetry/sdk-trace-base";
import { afterEach, expect, test } from "vitest";
import { decodeOk, KV_PARAMS_TEXT, prefillOk, sendJson } from "../support/fake-upstream.js";
import { post, runProxy, upstream } from "../support/set-up.js";

afterEach(() => {
  trace.disable();
  propagation.disable();
  context.disable();
});

const traceId = "0af7651916cd43dd8448eb211c80319c";
const traceparent = `00-${traceId}-b7ad6b7169203331-01`;

test("each leg has a span in the client's trace, and its instance gets that span as parent", async () => {
  const exporter = new InMemorySpanExporter();
  trace.setGlobalTracerProvider(
    new BasicTracerProvider({ spanProcessors: [new SimpleSpanProcessor(exporter)] }),
  );
  propagation.setGlobalPropagator(new W3CTraceContextPropagator());
  const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
  const { url } = await runProxy({ prefillers: [p.url], decoders: [d.url] });
  await post(`${url}/v1/completions`, { prompt: "a" }, { headers: { traceparent } });
  await expect
    .poll(() => exporter.getFinishedSpans().map(({ name }) => name))
    .toEqual(["kv_proxy.prefill", "kv_proxy.decode", "kv_proxy.request"]);
  const spans = exporter.getFinishedSpans();
  const request = spans[2]?.spanContext().spanId;
  expect(spans.map(({ parentSpanId }) => parentSpanId)).toEqual([request, request, "b7ad6b7169203331"]);
  for (const [at, instance] of [p, d].entries()) {
    const span = spans[at];
    expect(span?.spanContext().traceId).toBe(traceId);
    expect(span?.attributes).toMatchObject({
      "server.address": instance.url,
      "http.response.status_code": 200,
    });
    expect(instance.seen[0]?.headers.traceparent).toBe(`00-${traceId}-${span?.spanContext().spanId}-01`);
  }

  exporter.reset();
  const broken = await upstream(({ response }) => sendJson(response, { error: {} }, 500));
  const failing = await runProxy({ prefillers: [p.url], decoders: [broken.url] });
  await post(`${failing.url}/v1/completions`, { prompt: "a" });
  await expect
    .poll(() => exporter.getFinishedSpans().find(({ name }) => name === "kv_proxy.decode")?.attributes)
    .toMatchObject({ "error.type": "KV_PROXY_UPSTREAM_FAILED" });

  exporter.reset();
  await post(`${url}/v1/completions`, { prompt: "a" });
  await expect.poll(() => exporter.getFinishedSpans().length).toBe(3);
  const traces = new Set(exporter.getFinishedSpans().map((span) => span.spanContext().traceId));
  expect([traces.size, traces.has(traceId)]).toEqual([1, false]);
});

test("the inputs and the reason of the rule about one leg or two are on the spans of all legs", async () => {
  const exporter = new InMemorySpanExporter();
  trace.setGlobalTracerProvider(
    new BasicTracerProvider({ spanProcessors: [new SimpleSpanProcessor(exporter)] }),
  );
  const usage = { prompt_tokens: 20, prompt_tokens_details: { cached_tokens: 4 } };
  const p = await upstream(({ response }) =>
    sendJson(response, { choices: [], usage, kv_transfer_params: JSON.parse(KV_PARAMS_TEXT) }),
  );
  const d = await upstream(decodeOk);
  const { url } = await runProxy({ prefillers: [p.url], decoders: [d.url], disaggregateAbove: 10 });
  const prompts = [
    { length: 20, reason: "long-suffix", legs: ["kv_proxy.prefill", "kv_proxy.decode"] },
    { length: 5, reason: "short-suffix", legs: ["kv_proxy.decode"] },
  ];
  for (const [at, { length, reason, legs }] of prompts.entries()) {
    exporter.reset();
    await post(`${url}/v1/completions`, { prompt: Array.from({ length }, (_, id) => id) });
    await expect.poll(() => exporter.getFinishedSpans().length).toBe(legs.length + 1);
    const spans = exporter.getFinishedSpans().filter(({ name }) => name !== "kv_proxy.request");
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
      for (const name of measured) expect(typeof attributes[name]).toBe(at === 0 ? "undefined" : "number");
    }
    if (at === 0) expect(spans[0]?.attributes["kv.cached_tokens"]).toBe(4);
  }
});

test("without a tracer, the client's trace headers reach both instances unchanged", async () => {
  const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
  const { url } = await runProxy({ prefillers: [p.url], decoders: [d.url] });
  const headers = { traceparent, tracestate: "a=b", "x-data-parallel-rank": "3" };
  await post(`${url}/v1/completions`, { prompt: "a" }, { headers });
  for (const { seen } of [p, d]) expect(seen[0]?.headers).toMatchObject(headers);
});

test("an instance that is a data-parallel rank overrides the client's rank", async () => {
  const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
  const { url } = await runProxy({ prefillers: [`${p.url}@1`], decoders: [d.url] });
  await post(`${url}/v1/completions`, { prompt: "a" }, { headers: { "x-data-parallel-rank": "3" } });
  expect([p, d].map(({ seen }) => seen[0]?.headers["x-data-parallel-rank"])).toEqual(["1", "3"]);
});
