import { METRICS, memoryMetrics, readTransferConfig } from "@kv/connector";
import { type LogFields, silentLog } from "@kv/interface";
import type { KvNotification } from "@kv/protocol";
import { manualClock } from "@kv/testing/manual-clock";
import { leavesNothing } from "@kv/testing/nothing-left";
import { describe, expect, it } from "vitest";
import { connectorSettings } from "../../connector/src/config/connector-settings.js";
import { TransferMetrics } from "../../connector/src/peers/transfers.js";
import { WorkerOutputQueue } from "../../connector/src/worker/connector-worker.js";
import { PrefillWorker } from "./prefill-worker.js";

const settings = connectorSettings(
  readTransferConfig({ kv_connector: "pull", kv_role: "kv_both" }),
);

const CAPABILITY = "c".repeat(22);

function setUp() {
  const clock = manualClock(500);
  const output = new WorkerOutputQueue({ cachesUnverifiedKv: false });
  const counters = memoryMetrics();
  const metrics = new TransferMetrics(counters);
  const warned: [event: string, fields?: LogFields][] = [];
  const log = { ...silentLog, warn: (...entry: [string, LogFields?]) => void warned.push(entry) };
  const worker = new PrefillWorker({ clock, log, metrics, output, settings });
  const none = { schedulerClockMs: 9_000_000, inBatch: [], notSent: [], leases: [] };
  const named = (requestId: string) => ({
    requestId,
    wireId: `wire-${requestId}`,
    generation: 1,
    capability: CAPABILITY,
    blockIds: [[1]],
  });
  leavesNothing(
    () => ({ ...worker.outstanding(), timers: clock.pending() }),
    () => clock.advance(1_000_000),
  );
  return {
    clock,
    output,
    counters,
    warned,
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

  it("waits for the largest number of readers that one of them has said, and warns", () => {
    const { admit, lease, worker, sent, warned } = setUp();
    admit("r");
    lease("r");
    for (const [reader, readers] of [
      ["d0", 2],
      ["d1", 3],
    ] as const)
      worker.done("wire-r", readers, reader);
    expect(sent()).toEqual([]);
    worker.done("wire-r", 1, "d2");
    expect(sent()).toEqual(["r"]);
    const disagreed = warned.filter(([event]) => event === "completion-consumers-disagree");
    expect(disagreed).toHaveLength(2);
  });

  it("ignores a completion for a running request that is later not sent", () => {
    const { admit, notSent, worker, sent, rest } = setUp();
    admit("r");
    worker.done("wire-r", 1, "stranger");
    admit("s");
    worker.done("wire-s", 2, "one of two");
    notSent("s");
    notSent("r");
    expect(sent()).toEqual([]);
    expect(rest()).toBe(true);
  });

  it("reports a request as sent when its lease expires, by the time left on the scheduler's clock", () => {
    const { admit, lease, clock, worker, sent, counters, warned, rest } = setUp();
    admit("r");
    lease("r", 30_000);
    worker.done("wire-r", 2, "d0");
    clock.advance(29_999);
    expect(sent()).toEqual([]);
    clock.advance(1);
    expect(sent()).toEqual(["r"]);
    expect(warned).toContainEqual(["lease-expired", { requestId: "r", readers: 1 }]);
    expect(counters.total(METRICS.expiredRequests)).toBe(1);
    expect(counters.total(METRICS.notificationsAfterExpiry)).toBe(0);
    expect(rest()).toBe(true);
    worker.done("wire-r", 2, "d1");
    expect(counters.total(METRICS.expiredRequests)).toBe(1);
    expect(counters.total(METRICS.notificationsAfterExpiry)).toBe(1);
    expect(sent()).toEqual([]);
  });

  const own = (type: string, capability = CAPABILITY) => ({
    kind: "extension" as const,
    message: {
      type,
      request_ids: ["wire-r", "another"],
      capabilities: [capability, capability],
    },
  });
  it.each<[string, KvNotification, endsAfterMs: number, isTaken?: boolean]>([
    ["a vLLM D's", { kind: "heartbeat", requestIds: ["wire-r", "another"] }, 40_000],
    ["one of ours", own("heartbeat"), 40_000],
    ["one with a wrong capability", own("heartbeat", "d".repeat(22)), 30_000],
    ["a message of another type", own("another"), 30_000, false],
  ])("a heartbeat extends a lease: %s", (_, notification, endsAfterMs, isTaken = true) => {
    const { admit, lease, clock, worker, sent, counters } = setUp();
    admit("r");
    lease("r");
    clock.advance(20_000);
    expect(worker.notified(notification, "d0")).toBe(isTaken);
    clock.advance(endsAfterMs - 20_001);
    expect(sent()).toEqual([]);
    clock.advance(1);
    expect(sent()).toEqual(["r"]);
    expect(counters.total(METRICS.notificationsAfterExpiry)).toBe(0);
  });
});
