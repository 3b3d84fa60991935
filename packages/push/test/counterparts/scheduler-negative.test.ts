import { describe, expect, it } from "vitest";
import { BLOCKS, decodeRequest, PREFILL, prefillRequest, scheduler } from "./scheduler-alone.js";

// Counterparts of the unit tests of vLLM's push connector (PR 35264): input that the scheduler
// sides ignore or refuse.

describe("the scheduler does nothing", () => {
  it("without transfer parameters", async () => {
    const { made, step } = await scheduler();
    const request = { requestId: "x", numPromptTokens: 40, kvTransferParams: undefined };
    expect(made.matchedTokens(request, 0)).toEqual({ tokens: 0, async: false });
    made.afterAllocation(request, BLOCKS, 0);
    expect(made.requestFinished(request, BLOCKS, "length")).toEqual({ keepBlocks: false });
    expect(step()).toMatchObject({ registrations: [], leases: [], inBatch: [] });
  });

  it("with malformed remote_block_ids, and throws", async () => {
    const { made, step } = await scheduler();
    const request = decodeRequest("d1", { ...PREFILL, remote_block_ids: "no" });
    expect(() => made.matchedTokens(request, 0)).toThrow(/remote_block_ids/);
    expect(made.hasPendingWork()).toBe(true);
    // The producer gets a registration of no blocks, and frees its own.
    expect(step().registrations).toMatchObject([{ isAwaited: false, localBlockIds: [] }]);
  });

  it("with no external tokens, but releases the producer's blocks", async () => {
    const { made, step } = await scheduler();
    expect(made.matchedTokens(decodeRequest(), 40)).toEqual({ tokens: 0, async: false });
    made.afterAllocation(decodeRequest(), BLOCKS, 0);
    expect(step().registrations).toMatchObject([{ isAwaited: false, localBlockIds: [] }]);
    expect(made.outstanding().heartbeats).toBe(0);
  });

  it.each(["aborted", "error"] as const)("for a request that ended early (%s)", async (reason) => {
    const { made, step } = await scheduler();
    made.afterAllocation(prefillRequest(), BLOCKS, 0);
    expect(made.requestFinished(prefillRequest(), BLOCKS, reason)).toEqual({ keepBlocks: false });
    expect(step()).toMatchObject({ leases: [], notSent: ["p1"] });
  });

  it("with empty block groups", async () => {
    const { made, step } = await scheduler();
    expect(made.requestFinished(prefillRequest(), [[]], "length")).toEqual({ keepBlocks: false });
    expect(step().leases).toEqual([]);
  });

  it("with a worker's output about unknown requests", async () => {
    const { made } = await scheduler();
    made.applyWorkerOutput({
      finishedSending: ["?"],
      finishedReceiving: ["?"],
      failedReceiving: [],
      failedBlockIds: [],
    });
    expect(made.outstanding()).toMatchObject({ leases: 0, requests: 0 });
  });
});
