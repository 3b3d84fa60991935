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

describe("worker outputs of several ranks", () => {
  it("sent and received when every rank says so, counting a rank once", () => {
    const aggregate = createWorkerOutputAggregator({ workers: 2 });
    expect(
      aggregate.add({ tpRank: 0 }, output({ finishedSending: ["s"], finishedReceiving: ["r"] })),
    ).toEqual(output({}));
    expect(aggregate.add({ tpRank: 0 }, output({ finishedSending: ["s"] })).finishedSending).toEqual([]);
    expect(aggregate.size).toBe(2);
    expect(
      aggregate.add({ tpRank: 1 }, output({ finishedSending: ["s"], finishedReceiving: ["r"] })),
    ).toEqual(output({ finishedSending: ["s"], finishedReceiving: ["r"] }));
    expect(aggregate.size).toBe(0);
  });

  it("one rank's failure fails the request, and is told when the other rank has ended too", () => {
    const aggregate = createWorkerOutputAggregator({ workers: 2 });
    const failed = {
      finishedReceiving: ["r"],
      failedReceiving: [failure("r", [4, 5])],
      failedBlockIds: [4, 5],
    };
    expect(aggregate.add({ tpRank: 1 }, output(failed))).toEqual(output({}));
    expect(aggregate.add({ tpRank: 0 }, output({ finishedReceiving: ["r"] }))).toEqual(output(failed));
    expect(aggregate.add({ tpRank: 0 }, output({}))).toEqual(output({}));
  });

  it("each request's blocks are named with it, not with another that failed in the same step", () => {
    const aggregate = createWorkerOutputAggregator({ workers: 2 });
    aggregate.add(
      { tpRank: 0 },
      output({
        finishedReceiving: ["a", "b"],
        failedReceiving: [failure("a", [1]), failure("b", [2])],
        failedBlockIds: [1, 2],
      }),
    );
    expect(aggregate.add({ tpRank: 1 }, output({ finishedReceiving: ["b"] })).failedBlockIds).toEqual([2]);
    expect(aggregate.add({ tpRank: 1 }, output({ finishedReceiving: ["a"] })).failedBlockIds).toEqual([1]);
  });

  it("two ranks' failures are one, with every block once", () => {
    const aggregate = createWorkerOutputAggregator({ workers: 2 });
    const broken = (message: string, blockIds: number[]) =>
      output({
        finishedReceiving: ["r"],
        failedReceiving: [failure("r", blockIds, message)],
        failedBlockIds: blockIds,
      });
    aggregate.add({ tpRank: 0 }, broken("first", [4]));
    const merged = aggregate.add({ tpRank: 1 }, broken("second", [4, 5]));
    expect(merged.failedReceiving).toEqual([failure("r", [4, 5], "first")]);
    expect(merged.failedBlockIds).toEqual([4, 5]);
  });

  it("one worker's output goes through as it is", () => {
    const aggregate = createWorkerOutputAggregator({ workers: 1 });
    const all = output({
      finishedSending: ["s"],
      finishedReceiving: ["r"],
      failedReceiving: [failure("r", [1])],
      failedBlockIds: [2, 1],
      connectorData: { a: 1 },
    });
    expect(aggregate.add({ tpRank: 0 }, all)).toEqual(all);
  });

  it("blocks at risk: the request is reported again when no rank's can be written to any more", () => {
    const risky = { ...failure("r", [4]), blocksAtRisk: true };
    const failed = output({ finishedReceiving: ["r"], failedReceiving: [risky], failedBlockIds: [4] });
    const again = output({ finishedReceiving: ["r"] });

    const aggregate = createWorkerOutputAggregator({ workers: 2 });
    expect(aggregate.add({ tpRank: 0 }, failed).finishedReceiving).toEqual([]);
    expect(aggregate.add({ tpRank: 1 }, again)).toMatchObject({
      finishedReceiving: ["r"],
      failedReceiving: [{ requestId: "r", blocksAtRisk: true }],
    });
    expect(aggregate.size).toBe(1);
    expect(aggregate.add({ tpRank: 0 }, again)).toMatchObject({
      finishedReceiving: ["r"],
      failedReceiving: [],
    });
    expect(aggregate.size).toBe(0);

    // One that was secured before the other rank had ended at all was never at risk for the engine.
    expect(aggregate.add({ tpRank: 0 }, failed).finishedReceiving).toEqual([]);
    expect(aggregate.add({ tpRank: 0 }, again).finishedReceiving).toEqual([]);
    const told = aggregate.add({ tpRank: 1 }, again);
    expect(told.finishedReceiving).toEqual(["r"]);
    expect(told.failedReceiving[0]).not.toHaveProperty("blocksAtRisk");
    expect(aggregate.size).toBe(0);

    // Both ranks at risk: the last of them says so.
    aggregate.add({ tpRank: 0 }, failed);
    expect(aggregate.add({ tpRank: 1 }, failed).finishedReceiving).toEqual(["r"]);
    expect(aggregate.add({ tpRank: 1 }, again).finishedReceiving).toEqual([]);
    expect(aggregate.add({ tpRank: 0 }, again).finishedReceiving).toEqual(["r"]);
    expect(aggregate.size).toBe(0);
  });

  it("with pipeline stages counts each stage of a tensor-parallel rank as a worker", () => {
    const aggregate = createWorkerOutputAggregator({ workers: 2 });
    const sent = output({ finishedSending: ["s"] });
    expect(aggregate.add({ tpRank: 0, ppRank: 0 }, sent).finishedSending).toEqual([]);
    expect(aggregate.add({ tpRank: 0, ppRank: 1 }, sent).finishedSending).toEqual(["s"]);
    expect(aggregate.size).toBe(0);
  });
});
