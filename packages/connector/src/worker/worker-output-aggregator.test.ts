import type { FailedReceive, WorkerOutput } from "@kv/interface";
import { describe, expect, it } from "vitest";
import { createWorkerOutputAggregator } from "./worker-output-aggregator.js";

const output = (given: Partial<WorkerOutput>): WorkerOutput => ({
  finishedSending: [],
  finishedReceiving: [],
  failedReceiving: [],
  failedBlockIds: [],
  ...given,
});
const failure = (requestId: string, blockIds: number[], message = "broken"): FailedReceive => ({
  requestId,
  code: "KV_TRANSFER_FAILED",
  message,
  failureType: "transfer_failed",
  blockIds,
});

function setUp(workers = 2) {
  const aggregate = createWorkerOutputAggregator({ workers });
  return {
    add: (tpRank: number, given: Partial<WorkerOutput>, ppRank = 0) =>
      aggregate.add({ tpRank, ppRank }, output(given)),
    size: () => aggregate.size,
  };
}

describe("createWorkerOutputAggregator", () => {
  it("reports a request as sent or received once every rank has reported it, and counts each rank once", () => {
    const aggregate = setUp();
    expect(aggregate.add(0, { finishedSending: ["s"], finishedReceiving: ["r"] })).toEqual(
      output({}),
    );
    expect(aggregate.add(0, { finishedSending: ["s"] }).finishedSending).toEqual([]);
    expect(aggregate.size()).toBe(2);
    expect(aggregate.add(1, { finishedSending: ["s"], finishedReceiving: ["r"] })).toEqual(
      output({ finishedSending: ["s"], finishedReceiving: ["r"] }),
    );
    expect(aggregate.size()).toBe(0);
  });

  it("reports a request as unverified with its end when the P of one rank has not compared the prompts", () => {
    const aggregate = setUp();
    const unverified = { finishedReceiving: ["r"], unverifiedReceiving: ["r"] };
    expect(aggregate.add(0, unverified)).toEqual(output({}));
    expect(aggregate.add(1, { finishedReceiving: ["r"] })).toEqual(output(unverified));
    const again = { finishedReceiving: ["r"] };
    aggregate.add(0, again);
    expect(aggregate.add(1, again)).toEqual(output(again));
  });

  it("fails a request when one rank failed, and reports it once the other rank has finished too", () => {
    const aggregate = setUp();
    const failed = {
      finishedReceiving: ["r"],
      failedReceiving: [failure("r", [4, 5])],
      failedBlockIds: [4, 5],
    };
    expect(aggregate.add(1, failed)).toEqual(output({}));
    expect(aggregate.add(0, { finishedReceiving: ["r"] })).toEqual(output(failed));
    expect(aggregate.add(0, {})).toEqual(output({}));
  });

  it("reports failed blocks together with their own request when two requests failed in one step", () => {
    const aggregate = setUp();
    aggregate.add(0, {
      finishedReceiving: ["a", "b"],
      failedReceiving: [failure("a", [1]), failure("b", [2])],
      failedBlockIds: [1, 2],
    });
    expect(aggregate.add(1, { finishedReceiving: ["b"] }).failedBlockIds).toEqual([2]);
    expect(aggregate.add(1, { finishedReceiving: ["a"] }).failedBlockIds).toEqual([1]);
  });

  it("merges the failures of two ranks into one, with each block once", () => {
    const aggregate = setUp();
    const broken = (message: string, blockIds: number[]) =>
      output({
        finishedReceiving: ["r"],
        failedReceiving: [failure("r", blockIds, message)],
        failedBlockIds: blockIds,
      });
    aggregate.add(0, broken("first", [4]));
    const merged = aggregate.add(1, broken("second", [4, 5]));
    expect(merged.failedReceiving).toEqual([failure("r", [4, 5], "first")]);
    expect(merged.failedBlockIds).toEqual([4, 5]);
  });

  it("returns a single worker's output unchanged", () => {
    const aggregate = setUp(1);
    const all = output({
      finishedSending: ["s"],
      finishedReceiving: ["r"],
      failedReceiving: [failure("r", [1])],
      failedBlockIds: [2, 1],
      connectorData: { a: 1 },
    });
    expect(aggregate.add(0, all)).toEqual(all);
  });

  it("reports a request with blocks at risk again once no peer can write to any rank's blocks", () => {
    const risky = { ...failure("r", [4]), blocksAtRisk: true };
    const failed = output({
      finishedReceiving: ["r"],
      failedReceiving: [risky],
      failedBlockIds: [4],
    });
    const again = output({ finishedReceiving: ["r"] });

    const aggregate = setUp();
    expect(aggregate.add(0, failed).finishedReceiving).toEqual([]);
    expect(aggregate.add(1, again)).toMatchObject({
      finishedReceiving: ["r"],
      failedReceiving: [{ requestId: "r", blocksAtRisk: true }],
    });
    expect(aggregate.size()).toBe(1);
    expect(aggregate.add(0, again)).toMatchObject({
      finishedReceiving: ["r"],
      failedReceiving: [],
    });
    expect(aggregate.size()).toBe(0);

    // The first rank's blocks became safe before the other rank finished, so the engine never sees
    // them at risk.
    expect(aggregate.add(0, failed).finishedReceiving).toEqual([]);
    expect(aggregate.add(0, again).finishedReceiving).toEqual([]);
    const told = aggregate.add(1, again);
    expect(told.finishedReceiving).toEqual(["r"]);
    expect(told.failedReceiving[0]).not.toHaveProperty("blocksAtRisk");
    expect(aggregate.size()).toBe(0);

    // Both ranks are at risk: the request is reported again when the last rank reports its blocks
    // safe.
    aggregate.add(0, failed);
    expect(aggregate.add(1, failed).finishedReceiving).toEqual(["r"]);
    expect(aggregate.add(1, again).finishedReceiving).toEqual([]);
    expect(aggregate.add(0, again).finishedReceiving).toEqual(["r"]);
    expect(aggregate.size()).toBe(0);
  });

  it("counts each pipeline stage of a tensor-parallel rank as a worker", () => {
    const aggregate = setUp();
    const sent = output({ finishedSending: ["s"] });
    expect(aggregate.add(0, sent, 0).finishedSending).toEqual([]);
    expect(aggregate.add(0, sent, 1).finishedSending).toEqual(["s"]);
    expect(aggregate.size()).toBe(0);
  });
});
