import type { TraceSpan } from "@kv/protocol";
import { expect, test } from "vitest";
import { chooseRequest, requestTraces, timeShares } from "./request-trace.js";
import { traceSvg } from "./trace-svg.js";
import { traceText } from "./trace-text.js";

const traceId = "0af7651916cd43dd8448eb211c80319c";
let ids = 0;

function span(
  name: string,
  [startMs, endMs]: [number, number],
  {
    parent,
    process = "proxy",
    ...more
  }: { parent?: TraceSpan; process?: string } & Partial<TraceSpan> = {},
): TraceSpan {
  ids += 1;
  return {
    traceId,
    spanId: String(ids).padStart(16, "0"),
    parentSpanId: parent?.spanId,
    name,
    process,
    startMs,
    endMs,
    attributes: {},
    events: [],
    error: undefined,
    ...more,
  };
}

const request = span("kv_proxy.request", [100, 200], { attributes: { "kv.request_id": "r1" } });
const leg = span("kv_proxy.decode", [120, 200], { parent: request });
const engine = span("kv_engine.request", [130, 190], { parent: leg, process: "d" });
const attributes = { "kv.bytes": 65_536, "kv.descriptors": 4, "kv.backend": "UCX" };
const read = span("kv.read", [140, 160], { parent: engine, process: "d", attributes });
const lease = span("kv.lease", [190, 9000], {
  parent: engine,
  process: "p",
  events: [{ name: "extended", atMs: 195 }],
  error: "<too> late",
});
const spans = [lease, read, engine, request, leg];

test("the request's time is divided among the deepest spans; a lease that outlives its parent gets none", () => {
  const [trace] = requestTraces(spans);
  expect(trace?.spans.map(({ name, depth, isBackground }) => [name, depth, isBackground])).toEqual([
    ["kv_proxy.request", 0, false],
    ["kv_proxy.decode", 1, false],
    ["kv_engine.request", 2, false],
    ["kv.read", 3, false],
    ["kv.lease", 3, true],
  ]);
  const shares = timeShares(trace as NonNullable<typeof trace>);
  expect(shares.map(({ name, ms }) => [name, ms])).toEqual([
    ["kv_engine.request", 40],
    ["kv_proxy.request", 20],
    ["kv_proxy.decode", 20],
    ["kv.read", 20],
  ]);
  expect(shares.reduce((sum, { ms }) => sum + ms, 0)).toBe(100);
});

test("text and SVG name each span with what it moved, and what a trace says is escaped", () => {
  const [trace] = requestTraces(spans);
  const text = traceText(trace as NonNullable<typeof trace>);
  expect(text).toContain("request r1, trace 0af7651916cd43dd8448eb211c80319c");
  expect(text).toMatch(/kv\.read +=+ +40\.0 ms +20\.0 ms +64\.0 KiB, 4 descriptors, UCX/);
  expect(text).toMatch(/kv\.lease +x+ .*extended 1 times, failed: <too> late/);
  expect(text).toMatch(/60\.0 ms +60\.0 % +d\n/);
  const svg = traceSvg(trace as NonNullable<typeof trace>);
  expect(svg).toContain("&#60;too&#62; late");
  expect(svg).not.toContain("<too>");
  for (const { name } of spans) expect(svg).toContain(`>${name}<tspan`);
});

test("several requests of one client's trace: the slowest comes first; an id or its beginning chooses", () => {
  const outside = span("client", [0, 1000], { process: "client" });
  const quick = span("kv_proxy.request", [300, 310], { attributes: { "kv.request_id": "r2" } });
  const lost = span("kv_proxy.request", [0, 500], {
    parent: outside,
    attributes: { "kv.request_id": "x3" },
  });
  // The client's own spans are not in the file.
  const traces = requestTraces([quick, lost, ...spans]);
  expect(traces.map(({ requestId }) => requestId)).toEqual(["x3", "r1", "r2"]);
  expect(chooseRequest(traces, undefined).requestId).toBe("x3");
  expect(chooseRequest(traces, "r2").requestId).toBe("r2");
  expect(() => chooseRequest(traces, "none")).toThrow(/no request of the file is none/);
});

test("a client's own span in the file is the parent, and does not hide the request", () => {
  const outside = span("GET /", [0, 1000], { process: "client" });
  const inside = span("kv_proxy.request", [0, 500], { parent: outside });
  expect(requestTraces([outside, inside]).map(({ spans: all }) => all[0]?.name)).toEqual([
    "kv_proxy.request",
  ]);
});

test("spans that are each other's parents are no request, and end", () => {
  const one = span("kv.a", [0, 1], {
    parentSpanId: "00000000000000bb",
    spanId: "00000000000000aa",
  });
  const two = span("kv.b", [0, 1], {
    parentSpanId: "00000000000000aa",
    spanId: "00000000000000bb",
  });
  expect(requestTraces([one, two])).toEqual([]);
});
