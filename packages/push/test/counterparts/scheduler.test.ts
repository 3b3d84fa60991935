import { describe, expect, it } from "vitest";
import { BLOCKS, decodeRequest, prefillRequest, scheduler } from "./scheduler-alone.js";

// Counterparts of the unit tests of vLLM's push connector (PR 35264): the scheduler sides.

describe("scheduler", () => {
  it("decode stages a registration after allocation", async () => {
    const { made, step } = await scheduler();
    expect(made.matchedTokens(decodeRequest(), 0)).toEqual({ tokens: 40, async: true });
    made.afterAllocation(decodeRequest(), BLOCKS, 40);
    expect(step().registrations).toMatchObject([
      { requestId: "d1", localBlockIds: BLOCKS, isAwaited: true, host: "here" },
    ]);
  });

  it("prefill stages its blocks when the request finishes", async () => {
    const { made, step } = await scheduler();
    made.afterAllocation(prefillRequest(), BLOCKS, 0);
    expect(made.requestFinished(prefillRequest(), BLOCKS, "length").keepBlocks).toBe(true);
    expect(step().leases).toMatchObject([
      { requestId: "p1", promptBlockIds: BLOCKS, numTokens: 40 },
    ]);
  });

  it("building the metadata drains both halves", async () => {
    const { made, step } = await scheduler();
    made.matchedTokens(decodeRequest(), 0);
    made.afterAllocation(decodeRequest(), BLOCKS, 40);
    made.afterAllocation(prefillRequest(), [[1, 2, 3]], 0);
    made.requestFinished(prefillRequest(), [[1, 2, 3]], "stopped");
    const first = step();
    expect([first.registrations.length, first.leases.length, first.inBatch.length]).toEqual([
      1, 1, 1,
    ]);
    const second = step();
    expect([second.registrations, second.leases, second.inBatch, second.heartbeats]).toEqual([
      [],
      [],
      [],
      [],
    ]);
  });

  it("work is pending from its order until a step takes it", async () => {
    const { made, step } = await scheduler();
    expect(made.hasPendingWork()).toBe(false);
    made.matchedTokens(decodeRequest(), 0);
    made.afterAllocation(decodeRequest(), BLOCKS, 40);
    expect(made.hasPendingWork()).toBe(true);
    step();
    expect(made.hasPendingWork()).toBe(false);
    made.requestFinished(prefillRequest(), BLOCKS, "length");
    expect(made.hasPendingWork()).toBe(true);
    step();
    expect([made.hasPendingWork(), made.outstanding().leases]).toEqual([false, 1]);
  });

  it("a worker's output removes its requests", async () => {
    const { made, step } = await scheduler();
    made.requestFinished(prefillRequest(), BLOCKS, "length");
    made.matchedTokens(decodeRequest(), 0);
    made.afterAllocation(decodeRequest(), BLOCKS, 40);
    step();
    const none = { failedReceiving: [], failedBlockIds: [] };
    made.applyWorkerOutput({ finishedSending: ["p1"], finishedReceiving: ["d1"], ...none });
    expect(made.requestFinished(decodeRequest(), BLOCKS, "stopped")).toEqual({ keepBlocks: false });
    expect(made.outstanding()).toMatchObject({ running: 0, leases: 0, requests: 0, heartbeats: 0 });
  });

  it("the blocks of a registration that timed out are kept while a producer may write to them", async () => {
    const { made, step } = await scheduler();
    made.matchedTokens(decodeRequest(), 0);
    made.afterAllocation(decodeRequest(), BLOCKS, 40);
    step();
    const failed = {
      requestId: "d1",
      code: "KV_REQUEST_TIMEOUT",
      message: "m",
      failureType: "push_timed_out",
    } as const;
    const output = { finishedSending: [], finishedReceiving: ["d1"], failedBlockIds: [] };
    made.applyWorkerOutput({ ...output, failedReceiving: [{ ...failed, blocksAtRisk: true }] });
    expect(made.requestFinished(decodeRequest(), BLOCKS, "error")).toEqual({ keepBlocks: true });
    made.applyWorkerOutput({ ...output, failedReceiving: [] });
    expect(made.outstanding().requests).toBe(0);
  });
});
