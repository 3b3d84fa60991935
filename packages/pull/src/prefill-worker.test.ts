import { createOutbox, type TransferMetrics } from "@kv/connector";
import { silentLog } from "@kv/interface";
import { describe, expect, it } from "vitest";
import { fixedClock } from "../test/fixed-clock.js";
import { createPrefillWorker } from "./prefill-worker.js";

function setUp() {
  const clock = fixedClock(500);
  const outbox = createOutbox();
  const counted: string[] = [];
  const count = (name: string) => () => void counted.push(name);
  const metrics: TransferMetrics = {
    transferred: count("transferred"),
    transferFailed: count("transferFailed"),
    handshakeFailed: count("handshakeFailed"),
    notificationFailed: count("notificationFailed"),
    leaseExpired: count("leaseExpired"),
    notificationAfterExpiry: count("notificationAfterExpiry"),
  };
  const worker = createPrefillWorker({ clock, log: silentLog, metrics, outbox, extensionMs: 20_000 });
  const none = { schedulerClockMs: 9_000_000, inBatch: [], notSent: [], leases: [] };
  const named = (requestId: string) => ({
    requestId,
    wireId: `wire-${requestId}`,
    generation: 1,
    blockIds: [[1]],
  });
  return {
    clock,
    outbox,
    counted,
    worker,
    admit: (requestId: string) => worker.step({ ...none, inBatch: [named(requestId)] }),
    // The scheduler's clock has another origin, and the step was a while on its way.
    lease: (requestId: string, leftMs = 30_000) =>
      worker.step({
        ...none,
        leases: [
          { ...named(requestId), numTokens: 9, promptBlockIds: [[1]], expiresAtMs: 9_000_000 + leftMs },
        ],
      }),
    notSent: (requestId: string) => worker.step({ ...none, notSent: [requestId] }),
    sent: () => outbox.take().finishedSending,
    rest: () => Object.values(worker.outstanding()).every((held) => held === 0) && clock.pending() === 0,
  };
}

describe("prefill worker", () => {
  it("is done with a request when its n readers have spoken, by the name that readers know", () => {
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

  it("a reader may be done before the step that grants the lease: reported with that step", () => {
    const { admit, lease, worker, sent, rest } = setUp();
    admit("r");
    worker.done("wire-r", 1, "d0");
    expect(sent()).toEqual([]);
    lease("r");
    expect(sent()).toEqual(["r"]);
    expect(rest()).toBe(true);
  });

  it("nobody ends a request that still runs", () => {
    const { admit, notSent, worker, sent, rest } = setUp();
    admit("r");
    worker.done("wire-r", 1, "stranger");
    notSent("r");
    expect(sent()).toEqual([]);
    expect(rest()).toBe(true);
  });

  it("reports it when the lease runs out, by what was left of it on the scheduler's clock", () => {
    const { admit, lease, clock, worker, sent, counted, rest } = setUp();
    admit("r");
    lease("r", 30_000);
    worker.done("wire-r", 2, "d0");
    clock.advance(29_999);
    expect(sent()).toEqual([]);
    clock.advance(1);
    expect(sent()).toEqual(["r"]);
    expect(counted).toEqual(["leaseExpired"]);
    expect(rest()).toBe(true);
    worker.done("wire-r", 2, "d1");
    expect(counted).toEqual(["leaseExpired", "notificationAfterExpiry"]);
    expect(sent()).toEqual([]);
  });

  it("heartbeats keep it", () => {
    const { admit, lease, clock, worker, sent } = setUp();
    admit("r");
    lease("r", 30_000);
    for (let i = 0; i < 10; i++) {
      clock.advance(15_000);
      worker.heartbeat(["wire-r", "nobody"]);
    }
    expect(sent()).toEqual([]);
    clock.advance(20_000);
    expect(sent()).toEqual(["r"]);
  });
});
