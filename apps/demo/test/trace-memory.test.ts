import { readFileSync } from "node:fs";
import { join } from "node:path";
import { readSpans, recordedSpans, type TraceSpan } from "@kv/testing/recorded-spans";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { memoryNetwork } from "@kv/transport-memory";
import { expect, it, onTestFinished } from "vitest";
import { type ClusterOptions, planInstances } from "../src/cluster/cluster-plan.js";
import { PAIR, startPair } from "./support/matrix.js";
import { post, startInMemory } from "./support/memory-pair.js";

const traceId = "0af7651916cd43dd8448eb211c80319c";
const traceparent = `00-${traceId}-b7ad6b7169203331-01`;
const body = { prompt: Array.from({ length: 40 }, (_, at) => at + 7), max_tokens: 3 };

/**
 * Sends one request in a client's trace through a cluster, and returns the spans of all of its
 * servers.
 */
async function spansOf(options: Partial<ClusterOptions>): Promise<TraceSpan[]> {
  const trace = join(scratchFolder(onTestFinished), "spans.jsonl");
  {
    await using cluster = await startPair(options, { trace });
    expect((await post(cluster.proxy.url, body, { traceparent })).status).toBe(200);
  }
  return readFileSync(trace, "utf8").trim().split("\n").flatMap(readSpans);
}

/**
 * Each span's name below its parent's, by process, in order of their start; a client's span is the
 * parent of all.
 */
function shape(spans: readonly TraceSpan[]): string[] {
  const nameOf = (span: TraceSpan): string => {
    const parent = spans.find(({ spanId }) => spanId === span.parentSpanId);
    return `${parent === undefined ? "client" : parent.name} > ${span.process.split(" ")[1]} ${span.name}`;
  };
  return [...new Set(spans.toSorted((a, b) => a.startMs - b.startMs).map(nameOf))].toSorted();
}

const PROXY_AND_ENGINES = [
  "client > proxy kv_proxy.request",
  "kv_engine.request > decode-0 kv_engine.compute_prompt",
  "kv_engine.request > decode-0 kv_engine.generate",
  "kv_engine.request > decode-0 kv_engine.queue",
  "kv_engine.request > decode-0 kv.receive",
  "kv_engine.request > prefill-0 kv_engine.compute_prompt",
  "kv_engine.request > prefill-0 kv_engine.queue",
  "kv_engine.request > prefill-0 kv.lease",
  "kv_proxy.decode > decode-0 kv_engine.request",
  "kv_proxy.prefill > prefill-0 kv_engine.request",
  "kv_proxy.request > proxy kv_proxy.decode",
  "kv_proxy.request > proxy kv_proxy.prefill",
];

it("pull: one trace from the client to the last byte of the READ, with bytes, descriptors and backend", async () => {
  const spans = await spansOf({});
  expect(new Set(spans.map((span) => span.traceId))).toEqual(new Set([traceId]));
  expect(shape(spans)).toEqual(
    [
      ...PROXY_AND_ENGINES,
      "kv.receive > decode-0 kv.handshake",
      "kv.receive > decode-0 kv.lease_query",
      "kv.receive > decode-0 kv.plan",
      "kv.receive > decode-0 kv.read",
      "kv.receive > decode-0 kv.receive_pass",
      // Sent when the last request of D that reads the reference has ended, not with the READ.
      "kv_engine.request > decode-0 kv.notify",
    ].toSorted(),
  );
  const read = spans.find(({ name }) => name === "kv.read");
  expect(read?.attributes).toMatchObject({
    "kv.backend": "MEMORY",
    "kv.bytes": 3 * 4 * 4 * 16 * 64 * 4,
  });
  expect(Number(read?.attributes["kv.descriptors"])).toBeGreaterThan(0);
  expect(spans.filter(({ error }) => error !== undefined)).toEqual([]);
});

it("push: registration, WRITE and notification are in the client's trace", async () => {
  const spans = await spansOf({ connector: "NixlPushConnector" });
  expect(new Set(spans.map((span) => span.traceId))).toEqual(new Set([traceId]));
  expect(shape(spans)).toEqual(
    [
      ...PROXY_AND_ENGINES,
      "kv.push > prefill-0 kv.handshake",
      "kv.push > prefill-0 kv.plan",
      "kv.push > prefill-0 kv.write",
      "kv.receive > decode-0 kv.handshake",
      "kv.receive > decode-0 kv.plan",
      "kv.receive > decode-0 kv.receive_pass",
      "kv.receive > decode-0 kv.register",
      "kv_engine.request > prefill-0 kv.push",
    ].toSorted(),
  );
});

it("host staging: the copies between device and pool are spans on both sides", async () => {
  const spans = await spansOf({ prefillPlatform: "neuron", decodePlatform: "neuron" });
  expect(shape(spans)).toEqual(
    expect.arrayContaining([
      "kv_engine.request > prefill-0 kv.stage_save",
      "kv_engine.request > decode-0 kv.stage_load",
    ]),
  );
});

it("a front end without trace headers: D continues the trace that P's parameters carry", async () => {
  const network = memoryNetwork();
  const { tracer, spans } = recordedSpans();
  const { prefills, decodes } = planInstances(PAIR);
  const [p, d] = await Promise.all(
    [...prefills, ...decodes].map(async ({ name, config }) => {
      const instance = await startInMemory(name, config, network, { tracer });
      onTestFinished(() => instance.close());
      return instance;
    }),
  );
  const { body: prefilled } = await post(p?.url ?? "", {
    ...body,
    max_tokens: 1,
    kv_transfer_params: { do_remote_decode: true },
  });
  const [request] = spans().filter(({ name }) => name === "kv_engine.request");
  expect(prefilled.kv_transfer_params?.["kv_peer"]).toMatchObject({
    traceparent: `00-${request?.traceId}-${request?.spanId}-01`,
  });
  const { status } = await post(d?.url ?? "", {
    ...body,
    kv_transfer_params: prefilled.kv_transfer_params,
  });
  expect(status).toBe(200);
  const traces = new Map(spans().map((span) => [span.name, span.traceId]));
  expect(traces.get("kv_engine.generate")).toBe(request?.traceId);
  expect(traces.get("kv.read")).toBe(request?.traceId);
});
