import { KvError, type KvErrorCode } from "@kv/interface";
import { expect, test } from "vitest";
import {
  buildEngineTransferPlan,
  type EngineTransferPlan,
  planRequest,
  type RequestBlocks,
} from "./index.js";
import { samplePair, sampleRank } from "./sample-pair.test-support.js";

const equal = buildEngineTransferPlan(samplePair());
const wider = buildEngineTransferPlan(samplePair(sampleRank({ kernelBlockSize: 32 }), sampleRank()));
const windowed = buildEngineTransferPlan(samplePair(sampleRank(), sampleRank(), ["swa"]));
const ids = (plan: EngineTransferPlan, blocks: RequestBlocks) => {
  const [read] = planRequest(plan, blocks).reads;
  // The first region says it all; the other repeats it.
  const half = (read?.localIds.length ?? 0) / 2;
  return [[...(read?.localIds.subarray(0, half) ?? [])], [...(read?.remoteIds.subarray(0, half) ?? [])]];
};

test("ids are region by region; the second begins after all blocks of the first", () => {
  const [read] = planRequest(equal, { localBlockIds: [[4, 5]], remoteBlockIds: [[1, 2]] }).reads;
  expect([...(read?.localIds ?? [])]).toEqual([4, 5, 14, 15]);
  expect([...(read?.remoteIds ?? [])]).toEqual([1, 2, 11, 12]);
  expect(read?.lengthBytes).toBe(4 * 512);
});

test("a full hit reads nothing and notifies every rank that waits", () => {
  const remotes = Array.from({ length: 8 }, (_, tpRank) => sampleRank({ tpRank, tpSize: 8 }));
  const plan = buildEngineTransferPlan({ ...samplePair(), remotes });
  const request = planRequest(plan, { localBlockIds: [[]], remoteBlockIds: [[1, 2]] });
  expect(request).toMatchObject({ reads: [], receivePass: undefined, descriptorCount: 0 });
  expect([...request.notifyRanks].sort()).toEqual([0, 1, 2, 3, 4, 5, 6, 7]);
  expect(planRequest(plan, { localBlockIds: [], remoteBlockIds: [[1]] }).notifyRanks).toHaveLength(8);
});

test("without more knowledge, lists of equal blocks end together", () => {
  expect(ids(equal, { localBlockIds: [[7]], remoteBlockIds: [[1, 2, 3]] })).toEqual([[7], [3]]);
});

test("known computed blocks place the local ones, also off the boundaries of the remote's blocks", () => {
  // 5 prefill blocks of 16 hold 80 tokens; decode has the first 32 and wants the rest in two blocks of 32.
  const blocks = { localBlockIds: [[6, 7]], remoteBlockIds: [[0, 1, 2, 3, 4]], numTokens: 80 };
  const expected = [
    [12, 13, 14],
    [2, 3, 4],
  ];
  expect(ids(wider, { ...blocks, localComputedBlocks: [1] })).toEqual(expected);
  expect(ids(wider, blocks)).toEqual(expected);
});

test("blocks that the remote holds beyond the announced tokens are not read", () => {
  const blocks = {
    localBlockIds: [[6]],
    remoteBlockIds: [[1, 2, 3]],
    numTokens: 17,
    localComputedBlocks: [1],
  };
  expect(ids(equal, blocks)).toEqual([[6], [2]]);
});

test("kernel blocks of a logical block beyond the last token are not read either", () => {
  const rank = sampleRank({ physicalBlocksPerLogical: 2 });
  const plan = buildEngineTransferPlan(samplePair(rank, rank));
  expect(ids(plan, { localBlockIds: [[3]], remoteBlockIds: [[1]], numTokens: 16 })).toEqual([[6], [2]]);
});

test("a window's list is aligned at the last token", () => {
  const blocks = {
    localBlockIds: [[6, 7]],
    remoteBlockIds: [[1, 2]],
    numTokens: 90,
    localComputedBlocks: [4],
  };
  expect(ids(windowed, blocks)).toEqual([
    [6, 7],
    [1, 2],
  ]);
  expect(planRequest(windowed, blocks).receivePass?.groups).toEqual([
    {
      group: 0,
      permuteBlockIds: new Int32Array(0),
      zeroBlockIds: new Int32Array(0),
      partialBlock: { blockId: 7, fromToken: 10 },
    },
  ]);
  expect(ids(windowed, { localBlockIds: [[7]], remoteBlockIds: [[1, 2, 3]], numTokens: 90 })).toEqual([
    [7],
    [3],
  ]);
});

test("the pass zeroes the tail of the last block and blocks that nothing reached, and permutes those touched", () => {
  const blocks = {
    localBlockIds: [[6, 7]],
    remoteBlockIds: [[1, 2, 3]],
    numTokens: 40,
    localComputedBlocks: [0],
  };
  expect(planRequest(wider, blocks).receivePass?.groups).toEqual([
    {
      group: 0,
      permuteBlockIds: Int32Array.of(6, 7),
      zeroBlockIds: new Int32Array(0),
      partialBlock: { blockId: 7, fromToken: 8 },
    },
  ]);
  const padded = buildEngineTransferPlan(
    samplePair(sampleRank({ physicalBlocksPerLogical: 2 }), sampleRank()),
  );
  const cut = { localBlockIds: [[3]], remoteBlockIds: [[1]], numTokens: 16 };
  expect(planRequest(padded, cut).receivePass?.groups).toEqual([
    { group: 0, permuteBlockIds: new Int32Array(0), zeroBlockIds: Int32Array.of(7) },
  ]);
});

test("runs are counted after ordering, over all regions and reads", () => {
  const request = planRequest(equal, { localBlockIds: [[9, 8, 7, 3]], remoteBlockIds: [[5, 4, 3, 9]] });
  expect(request).toMatchObject({ descriptorCount: 8, runCount: 4 });
});

test.each<[string, EngineTransferPlan, RequestBlocks, KvErrorCode, RegExp]>([
  [
    "more local than remote blocks",
    equal,
    { localBlockIds: [[1, 2]], remoteBlockIds: [[1]] },
    "KV_BLOCKS_MISMATCH",
    /2 local .*1 remote/,
  ],
  [
    "local blocks that begin where the remote's end",
    equal,
    { localBlockIds: [[1]], remoteBlockIds: [[1, 2]], localComputedBlocks: [2] },
    "KV_BLOCKS_MISMATCH",
    /1 local blocks .* after 2 computed ones/,
  ],
  [
    "fewer remote blocks than the tokens need",
    equal,
    { localBlockIds: [[1]], remoteBlockIds: [[1]], numTokens: 17 },
    "KV_BLOCKS_MISMATCH",
    /hold 16 tokens at most, fewer than the 17/,
  ],
  [
    "unequal blocks of which nobody knows the begin",
    wider,
    { localBlockIds: [[1]], remoteBlockIds: [[1, 2, 3]] },
    "KV_BLOCKS_MISMATCH",
    /cannot be told/,
  ],
  [
    "a windowed list longer than its sequence",
    windowed,
    { localBlockIds: [[1]], remoteBlockIds: [[1, 2, 3]], numTokens: 20 },
    "KV_BLOCKS_MISMATCH",
    /cannot be told/,
  ],
  [
    "too few groups",
    equal,
    { localBlockIds: [[1]], remoteBlockIds: [] },
    "KV_BLOCKS_MISMATCH",
    /remote .*0 KV cache groups .* has 1/,
  ],
  [
    "too many groups",
    equal,
    { localBlockIds: [[1], []], remoteBlockIds: [[1]] },
    "KV_BLOCKS_MISMATCH",
    /local .*2 KV cache groups/,
  ],
  [
    "tokens that are none",
    equal,
    { localBlockIds: [[1]], remoteBlockIds: [[1]], numTokens: 0 },
    "KV_BLOCKS_MISMATCH",
    /numTokens is 0/,
  ],
  [
    "computed blocks that are none",
    equal,
    { localBlockIds: [[1]], remoteBlockIds: [[1]], localComputedBlocks: [-1] },
    "KV_BLOCKS_MISMATCH",
    /localComputedBlocks of group 0 is -1/,
  ],
  [
    "a local block outside",
    equal,
    { localBlockIds: [[10]], remoteBlockIds: [[1]] },
    "KV_BLOCKS_OUT_OF_RANGE",
    /local block 10 .* 10 blocks/,
  ],
  [
    "a remote block outside",
    equal,
    { localBlockIds: [[1]], remoteBlockIds: [[-1]] },
    "KV_BLOCKS_OUT_OF_RANGE",
    /remote block -1/,
  ],
  [
    "half a block",
    equal,
    { localBlockIds: [[1]], remoteBlockIds: [[1.5]] },
    "KV_BLOCKS_OUT_OF_RANGE",
    /remote block 1.5/,
  ],
  [
    "a local block twice",
    equal,
    { localBlockIds: [[3, 3]], remoteBlockIds: [[1, 2]] },
    "KV_BLOCKS_OUT_OF_RANGE",
    /block 3 .*twice/,
  ],
])("refuses %s", (_what, plan, blocks, code, message) => {
  const attempt = () => planRequest(plan, blocks);
  expect(attempt).toThrow(message);
  try {
    attempt();
  } catch (error) {
    expect(KvError.is(error) && error.code).toBe(code);
  }
});
