import { expect, test } from "vitest";
import { readSpans } from "./read-spans.js";

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
