import { expect, test } from "vitest";
import { buildEngineTransferPlan, type EngineTransferPlan } from "../engine/engine-plan.js";
import type { TransferList } from "../engine/source-plans.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import { planRequest, type RequestPlan } from "../request/request-plan.js";
import { samplePair, samplePlan, sampleRank, withRegions } from "../sample-pair.test-support.js";
import { mergedDescriptorCount } from "./descriptors.js";
import { provePlan } from "./prove-plan.js";

/**
 * Pages of two layers in one row per block: 512 bytes of attention, then padding into which a state
 * reaches.
 */
function rankOf(base: number): RankGeometry {
  const [pageBytes, rowBytes] = [1024, 2048];
  const stateSpace = { convProjectionBytes: [256, 128, 128], convBytes: 512, recurrentBytes: 256 };
  return withRegions(sampleRank({ layout: "BLHNC", stateSpace }), (_, layer) => ({
    baseAddress: base + layer * pageBytes,
    blockStrideBytes: rowBytes,
    groupId: -1,
  }));
}

test("in a packed row, a state after a page's attention belongs to the page's layer", () => {
  const [local, remote] = [rankOf(2 ** 30), rankOf(2 ** 31)];
  const plan = samplePlan(local, remote, { groups: ["full", "mamba"] });
  expect(provePlan(plan, { remotes: [remote], numKvHeads: 4 })).toMatchObject({ proven: true });
});

const blocks = { localBlockIds: [[3, 4, 5, 8]], remoteBlockIds: [[1, 2, 3, 7]] };

function merged({ sources }: EngineTransferPlan, { reads }: RequestPlan): number {
  return reads.reduce((sum, read) => {
    const list = sources[read.sourceIndex]?.lists[read.listIndex] as TransferList;
    return sum + mergedDescriptorCount(read, list);
  }, 0);
}

function counts(pair: ReturnType<typeof samplePair>) {
  const plan = buildEngineTransferPlan(pair);
  const request = planRequest(plan, blocks);
  return [request.descriptorCount, request.runCount, merged(plan, request)];
}

test("each run of whole unpadded blocks merges into one descriptor", () => {
  expect(counts(samplePair())).toEqual([8, 4, 4]);
});

test("parts of blocks and padded blocks do not merge, even with consecutive ids", () => {
  const share = samplePair(sampleRank({ tpSize: 2 }), sampleRank());
  expect(counts(share)).toEqual([8, 4, 8]);
  const rank = sampleRank();
  const padded = withRegions(rank, ({ blockLengthBytes }) => ({
    blockStrideBytes: blockLengthBytes + 64,
  }));
  expect(counts(samplePair(rank, padded))).toEqual([8, 4, 8]);
});

test("a run merges across regions that are adjacent on both sides", () => {
  const rank = withRegions(sampleRank(), ({ blockLengthBytes }, index) => ({
    baseAddress: 4096 + index * 10 * blockLengthBytes,
  }));
  const plan = samplePlan(rank, rank);
  const request = planRequest(plan, { localBlockIds: [[0, 9]], remoteBlockIds: [[0, 9]] });
  expect([request.runCount, merged(plan, request)]).toEqual([4, 3]);
});

/** A list with rows of 16-byte descriptors on both sides; each row is [address, stride, count]. */
const list = (local: readonly (readonly number[])[], remote: readonly (readonly number[])[]) => {
  const table = (rows: readonly (readonly number[])[]) => ({
    memoryType: "DRAM" as const,
    rows: Float64Array.from(
      rows.flatMap(([address = 0, stride = 0, count = 0]) => [address, 16, 0, stride, count]),
    ),
  });
  return { localTable: table(local), remoteTable: table(remote) } as unknown as TransferList;
};

const WHOLE = [[0, 16, 8]];
const ADJACENT = [
  [1000, 16, 4],
  [1064, 16, 4],
];
const SEPARATE = [
  [1000, 16, 4],
  [5000, 16, 4],
];
const ALL = [0, 0, 8];

test.each([
  ["adjacent local rows", ADJACENT, WHOLE, ALL, 1],
  ["adjacent remote rows", WHOLE, ADJACENT, ALL, 1],
  ["separate local rows", SEPARATE, WHOLE, ALL, 2],
  ["separate remote rows", WHOLE, SEPARATE, ALL, 2],
  [
    "separate rows that end at different descriptors on each side",
    [
      [1000, 16, 2],
      [5000, 16, 6],
    ],
    [
      [0, 16, 5],
      [9000, 16, 3],
    ],
    ALL,
    3,
  ],
  ["separate rows, starting inside the first", SEPARATE, WHOLE, [2, 1, 4], 2],
  ["local gaps", [[0, 32, 8]], WHOLE, ALL, 8],
  ["remote gaps", WHOLE, [[0, 32, 8]], ALL, 8],
  [
    "gaps and separate rows",
    [
      [0, 32, 3],
      [5000, 16, 5],
    ],
    WHOLE,
    ALL,
    4,
  ],
  ["adjacent runs", WHOLE, WHOLE, [0, 0, 2, 2, 2, 3], 1],
  ["locally adjacent runs", WHOLE, WHOLE, [0, 0, 2, 2, 4, 2], 2],
  ["remotely adjacent runs", WHOLE, WHOLE, [0, 0, 2, 4, 2, 2], 2],
  ["no run", WHOLE, WHOLE, [], 0],
])("merges a request's descriptors: %s", (_, local, remote, runs, pieces) => {
  expect(mergedDescriptorCount({ runs: Int32Array.from(runs) }, list(local, remote))).toBe(pieces);
});
