import { expect, test } from "vitest";
import { createProxy, type WorkerReport } from "../proxy.js";
import { mergedRequests, mergedRunning, mergedStatus } from "./worker-report.js";

test("the state of several workers is that of one proxy: counts add up, signals are of all, an instance is as bad as at its worst", async () => {
  const proxy = createProxy({
    prefillers: ["p:1"],
    decoders: ["d:1"],
    pairing: { mode: "off" },
    health: { intervalMs: 0 },
  });
  const status = proxy.status();
  await proxy.close({ graceMs: 0 });
  const [p] = status.prefillers;
  if (p === undefined) throw new Error("no instance");
  const report = (
    inFlight: number,
    available: boolean,
    promptTokens: number,
    at: string,
  ): WorkerReport => ({
    status: {
      ...status,
      requests: { ...status.requests, total: 3, failed: { KV_INTERNAL: 1 } },
      prefillers: [{ ...p, in_flight: inFlight, available, state: available ? "up" : "ejected" }],
    },
    measured: {
      promptTokens,
      cachedTokens: 10,
      workMs: 30_000,
      windowMs: 60_000,
      unread: { count: 1, countWithBytes: 1, bytes: 5, oldestMs: inFlight },
    },
    requests: [{ request_id: at, endpoint: "/", began_at: at, outcome: "200", duration_ms: 1 }],
    running: [{ request_id: at, endpoint: "/", began_at: at, outcome: "running", duration_ms: 1 }],
  });
  const reports = [
    report(1, true, 10, "2026-01-01T00:00:02.000Z"),
    report(2, false, 30, "2026-01-01T00:00:01.000Z"),
  ] as const;
  const merged = mergedStatus([...reports]);
  expect(merged.requests).toMatchObject({ total: 6, failed: { KV_INTERNAL: 2 } });
  expect(merged.prefillers).toMatchObject([{ in_flight: 3, available: false, state: "ejected" }]);
  // One leg at each of two workers: two wait behind the first, which neither worker sees by itself.
  expect(merged.signals).toMatchObject({
    prefill_waiting: 2,
    kv_unread: { count: 2, bytes: 10, oldest_ms: 2 },
    prefix_hit_rate: 0.5,
    // Two workers that each kept half an instance busy need two, not one each.
    recommended: { prefill: 2 },
  });
  for (const merge of [mergedRequests, mergedRunning])
    expect(merge(reports).map((one) => one.request_id)).toEqual([
      "2026-01-01T00:00:01.000Z",
      "2026-01-01T00:00:02.000Z",
    ]);
});
