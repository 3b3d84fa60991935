import { KvError, readTraceparent } from "@kv/interface";
import { expect, test } from "vitest";
import { OtlpTracer } from "./otlp-tracer.js";
import { readSpans } from "./read-spans.js";

function recorded() {
  const timers: (() => void)[] = [];
  let nowMs = 0;
  const lines: string[] = [];
  const clock = {
    now: () => nowMs,
    setTimer(run: () => void) {
      timers.push(run);
      return { cancel: () => void timers.splice(timers.indexOf(run), 1) };
    },
  };
  const tracer = new OtlpTracer({
    service: "s",
    instance: "i",
    clock,
    write: (line) => lines.push(line),
  });
  return { tracer, lines, timers, pass: (ms: number) => (nowMs += ms) };
}

test("a span is read back as it was recorded: parent, times, attributes, events, error", () => {
  const { tracer, lines, pass } = recorded();
  const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
  const span = tracer.start('a "name"', {
    parent,
    kind: "server",
    attributes: { n: 7, x: 0.5, no: undefined },
  });
  pass(2);
  span?.event("extended", { by: 20 });
  pass(3);
  span?.set({ ok: true, s: "ü\n", x: 0.25 });
  span?.end(new KvError("KV_LEASE_EXPIRED", "too late"));
  span?.end();
  tracer.flush();
  expect(lines).toHaveLength(1);
  const [read, ...more] = readSpans(lines[0] ?? "");
  expect(more).toEqual([]);
  expect(read).toMatchObject({
    traceId: "0af7651916cd43dd8448eb211c80319c",
    parentSpanId: "b7ad6b7169203331",
    name: 'a "name"',
    process: "s i",
    attributes: { n: 7, x: 0.25, ok: true, s: "ü\n", "error.type": "KV_LEASE_EXPIRED" },
    error: "too late",
  });
  expect(lines[0]?.split('"key":"x"')).toHaveLength(2);
  expect((read?.endMs ?? 0) - (read?.startMs ?? 0)).toBeCloseTo(5, 2);
  expect((read?.events[0]?.atMs ?? 0) - (read?.startMs ?? 0)).toBeCloseTo(2, 2);
  expect(Math.abs((read?.startMs ?? 0) - Date.now())).toBeLessThan(60_000);
  expect(span?.traceparent).toBe(`00-${read?.traceId}-${read?.spanId}-01`);
});

test("times are right at each part of a second", () => {
  const { tracer, lines, pass } = recorded();
  for (let i = 0; i < 1600; i++) {
    const span = tracer.start("a");
    pass(0.7);
    span?.end();
  }
  tracer.close();
  const spans = lines.flatMap((line) => readSpans(line));
  expect(spans).toHaveLength(1600);
  for (const [at, { startMs, endMs }] of spans.entries()) {
    expect(endMs - startMs).toBeCloseTo(0.7, 2);
    if (at > 0) expect(startMs).toBe(spans[at - 1]?.endMs);
  }
});

test("a malformed or absent parent begins a new trace; a parent that is not sampled gives no span", () => {
  const { tracer } = recorded();
  const ids = [undefined, "", "00-0-1-01", `00-${"0".repeat(32)}-b7ad6b7169203331-01`].map(
    (parent) => tracer.start("a", { parent })?.traceparent.slice(3, 35) ?? "",
  );
  expect(new Set(ids).size).toBe(4);
  for (const id of ids) expect(id).toMatch(/^[0-9a-f]{32}$/);
  const unsampled = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";
  expect(tracer.start("a", { parent: unsampled })).toBeUndefined();
  expect(readTraceparent(unsampled)).toBe(unsampled);
  expect(readTraceparent([unsampled])).toBeUndefined();
});

test("ended spans are written together, by number or by time, and none after close", () => {
  const { tracer, lines, timers } = recorded();
  const open = tracer.start("late");
  for (let i = 0; i < 256; i++) tracer.start("a")?.end();
  expect([lines.length, timers.length]).toEqual([1, 0]);
  tracer.start("b")?.end();
  expect([lines.length, timers.length]).toEqual([1, 1]);
  timers[0]?.();
  expect(lines).toHaveLength(2);
  tracer.close();
  open?.end();
  tracer.flush();
  expect(lines).toHaveLength(2);
});

const span = {
  traceId: "0af7651916cd43dd8448eb211c80319c",
  spanId: "b7ad6b7169203331",
  name: "a",
  startTimeUnixNano: "2000000",
  endTimeUnixNano: "3000000",
};
const line = (spans: unknown) => JSON.stringify({ resourceSpans: [{ scopeSpans: [{ spans }] }] });

test.each([
  ["no JSON", "{", /no JSON/],
  ["another program's trace", JSON.stringify({ traceEvents: [] }), /resourceSpans is missing/],
  ["a list", "[]", /a map/],
  ["a trace id of zeros and letters", line([{ ...span, traceId: "xyz" }]), /traceId is "xyz"/],
  ["a span without a name", line([{ ...span, name: "" }]), /name/],
  ["an end before the start", line([{ ...span, endTimeUnixNano: "1" }]), /endTimeUnixNano/],
  [
    "a time that is no number",
    line([{ ...span, startTimeUnixNano: "soon" }]),
    /startTimeUnixNano is "soon"/,
  ],
  ["spans that are no list", line({}), /spans/],
])("%s is refused, naming the field", (_, text, message) => {
  expect(() => readSpans(text)).toThrow(message);
});

test("a span of an OpenTelemetry Collector is read: numbers as times, lists as attributes left out", () => {
  const attributes = [
    { key: "l", value: { arrayValue: { values: [] } } },
    { key: "d", value: { doubleValue: 1 } },
  ];
  const given = { ...span, parentSpanId: "", startTimeUnixNano: 2_000_000, attributes, status: {} };
  expect(readSpans(line([given]))).toEqual([
    {
      traceId: span.traceId,
      spanId: span.spanId,
      parentSpanId: undefined,
      name: "a",
      process: "unknown",
      startMs: 2,
      endMs: 3,
      attributes: { d: 1 },
      events: [],
      error: undefined,
    },
  ]);
});
