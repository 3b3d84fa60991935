import { METRICS, memoryMetrics, readTransferConfig } from "@kv/connector";
import { silentLog } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { describe, expect, it } from "vitest";
import { connectorSettings } from "../../connector/src/config/connector-settings.js";
import { TransferMetrics } from "../../connector/src/peers/transfers.js";
import { WorkerOutputQueue } from "../../connector/src/worker/connector-worker.js";
import { PrefillWorker } from "./prefill-worker.js";

const settings = connectorSettings(
  readTransferConfig({ kv_connector: "pull", kv_role: "kv_both" }),
);

function setUp() {
  const clock = manualClock(500);
  const output = new WorkerOutputQueue({ cachesUnverifiedKv: false });
  const counters = memoryMetrics();
  const metrics = new TransferMetrics(counters);
  const worker = new PrefillWorker({ clock, log: silentLog, metrics, output, settings });
  const none = { schedulerClockMs: 9_000_000, inBatch: [], notSent: [], leases: [] };
  const named = (requestId: string) => ({
    requestId,
    wireId: `wire-${requestId}`,
    generation: 1,
    blockIds: [[1]],
  });
  return {
    clock,
    output,
    counters,
    worker,
    admit: (requestId: string) => worker.step({ ...none, inBatch: [named(requestId)] }),
    // The scheduler's clock has another origin than the worker's.
    lease: (requestId: string, leftMs = 30_000) =>
      worker.step({
        ...none,
        leases: [
          {
            ...named(requestId),
            numTokens: 9,
            promptBlockIds: [[1]],
            expiresAtMs: 9_000_000 + leftMs,
          },
        ],
      }),
    notSent: (requestId: string) => worker.step({ ...none, notSent: [requestId] }),
    sent: () => output.take().finishedSending,
    rest: () =>
      Object.values(worker.outstanding()).every((held) => held === 0) && clock.pending() === 0,
  };
}

describe("prefill worker", () => {
  it("reports a request as sent after n distinct readers have completed it by its wire id", () => {
    const { admit, lease, worker, sent, rest } = setUp();
    admit("r");
    lease("r");
    worker.done("wire-r", 2, "d0");
    worker.done("wire-r", 2, "d0");
    expect(sent()).toEqual([]);
    worker.done("wire-r", 2, "d1");
    expect(sent()).toEqual(["r"]);
    expect(rest()).toBe(true);
  });

  it("reports a request with the step that grants its lease if the reader completed before", () => {
    const { admit, lease, worker, sent, rest } = setUp();
    admit("r");
    worker.done("wire-r", 1, "d0");
    expect(sent()).toEqual([]);
    lease("r");
    expect(sent()).toEqual(["r"]);
    expect(rest()).toBe(true);
  });

  it("ignores a completion for a running request that is later not sent", () => {
    const { admit, notSent, worker, sent, rest } = setUp();
    admit("r");
    worker.done("wire-r", 1, "stranger");
    notSent("r");
    expect(sent()).toEqual([]);
    expect(rest()).toBe(true);
  });

  it("reports a request as sent when its lease expires, by the time left on the scheduler's clock", () => {
    const { admit, lease, clock, worker, sent, counters, rest } = setUp();
    admit("r");
    lease("r", 30_000);
    worker.done("wire-r", 2, "d0");
    clock.advance(29_999);
    expect(sent()).toEqual([]);
    clock.advance(1);
    expect(sent()).toEqual(["r"]);
    expect(counters.total(METRICS.expiredRequests)).toBe(1);
    expect(counters.total(METRICS.notificationsAfterExpiry)).toBe(0);
    expect(rest()).toBe(true);
    worker.done("wire-r", 2, "d1");
    expect(counters.total(METRICS.expiredRequests)).toBe(1);
    expect(counters.total(METRICS.notificationsAfterExpiry)).toBe(1);
    expect(sent()).toEqual([]);
  });

  it("keeps a request while heartbeats arrive", () => {
    const { admit, lease, clock, worker, sent } = setUp();
    admit("r");
    lease("r", 30_000);
    for (let i = 0; i < 10; i++) {
      clock.advance(15_000);
      worker.heartbeat([{ requestId: "wire-r" }, { requestId: "nobody" }], "d");
    }
    expect(sent()).toEqual([]);
    clock.advance(20_000);
    expect(sent()).toEqual(["r"]);
  });
});
