import { KvError, readTraceparent } from "@kv/interface";
import { recordedSpans } from "@kv/testing/recorded-spans";
import { ProxyTracerProvider } from "@opentelemetry/api";
import { AlwaysOffSampler, TracerProvider } from "@opentelemetry/sdk-trace";
import { expect, test } from "vitest";
import { openTelemetryTracer } from "./open-telemetry.js";

const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

test("a span is read back as it was recorded: parent, times, attributes, events, error", async () => {
  const { tracer, spans, line } = recordedSpans();
  const before = performance.timeOrigin + performance.now();
  const span = tracer.start('a "name"', {
    parent,
    kind: "server",
    attributes: { n: 7, x: 0.5, no: undefined },
  });
  span?.event("extended", { by: 20 });
  await new Promise((resolve) => setTimeout(resolve, 5));
  span?.set({ ok: true, s: "ü\n", x: 0.25, nothing: undefined });
  span?.end(new KvError("KV_LEASE_EXPIRED", "too late"));
  const after = performance.timeOrigin + performance.now();
  span?.set({ late: true });
  span?.event("late");
  span?.end();
  const [read, ...more] = spans();
  expect(more).toEqual([]);
  expect(read).toMatchObject({
    traceId: "0af7651916cd43dd8448eb211c80319c",
    parentSpanId: "b7ad6b7169203331",
    name: 'a "name"',
    error: "too late",
  });
  expect(read?.attributes).toEqual({
    n: 7,
    x: 0.25,
    ok: true,
    s: "ü\n",
    "error.type": "KV_LEASE_EXPIRED",
  });
  const { startMs = 0, endMs = 0, events = [] } = read ?? {};
  expect(events.map(({ name }) => name)).toEqual(["extended"]);
  const times = [before, startMs, events[0]?.atMs ?? 0, endMs, after];
  // A double of milliseconds since 1970 is exact to a microsecond.
  for (const [at, time] of times.entries())
    expect(time).toBeGreaterThan((times[at - 1] ?? 0) - 0.002);
  expect(endMs - startMs).toBeGreaterThan(4);
  expect(span?.traceparent).toBe(`00-${read?.traceId}-${read?.spanId}-01`);
  expect(line()).toContain('"kind":2');
});

test("times are right to a part of a millisecond", () => {
  const { tracer, spans } = recordedSpans();
  for (let i = 0; i < 50; i++) tracer.start("a")?.end();
  expect(spans().filter(({ startMs }) => !Number.isInteger(startMs))).not.toHaveLength(0);
});

test("a malformed or absent parent begins a new trace; a parent that is not sampled gives no span", () => {
  const { tracer } = recordedSpans();
  const ids = [undefined, "", "00-0-1-01", `00-${"0".repeat(32)}-b7ad6b7169203331-01`].map(
    (malformed) => tracer.start("a", { parent: malformed })?.traceparent.slice(3, 35) ?? "",
  );
  expect(new Set(ids).size).toBe(4);
  for (const id of ids) expect(id).toMatch(/^[0-9a-f]{32}$/);
  const unsampled = parent.replace(/01$/, "00");
  expect(tracer.start("a", { parent: unsampled })).toBeUndefined();
  expect(readTraceparent(unsampled)).toBe(unsampled);
  expect(readTraceparent([unsampled])).toBeUndefined();
});

test("a trace that the provider does not sample is sampled nowhere; without a provider there is no span", () => {
  const provider = new TracerProvider({ sampler: new AlwaysOffSampler() });
  const off = openTelemetryTracer(provider.getTracer("off"));
  const span = off.start("a");
  expect(span?.traceparent).toMatch(/^00-[0-9a-f]{32}-[0-9a-f]{16}-00$/);
  expect(off.start("b", { parent: span?.traceparent })).toBeUndefined();
  span?.end();
  const none = openTelemetryTracer(new ProxyTracerProvider().getTracer("none"));
  expect(none.start("a")).toBeUndefined();
});
