import type { KvErrorCode } from "@kv/interface";
import { describe, expect, test } from "vitest";
import type { EngineTransferPlan } from "../engine/engine-plan.js";
import { refused } from "../refused.test-support.js";
import { ownGroups, samplePlan, sampleRank, withRegions } from "../sample-pair.test-support.js";
import type { RequestBlocks } from "./request-blocks.js";
import { planRequest } from "./request-plan.js";

const equal = samplePlan();
const wider = samplePlan({ kernelBlockSize: 32 });
const windowed = samplePlan({}, {}, { groups: ["swa"] });
const ids = (plan: EngineTransferPlan, blocks: RequestBlocks) => {
  const [read] = planRequest(plan, blocks).reads;
  // The second region repeats the ids of the first.
  const half = (read?.localIds.length ?? 0) / 2;
  return [
    [...(read?.localIds.subarray(0, half) ?? [])],
    [...(read?.remoteIds.subarray(0, half) ?? [])],
  ];
};

test("lists ids region by region, offset by the blocks of earlier regions", () => {
  const [read] = planRequest(equal, { localBlockIds: [[4, 5]], remoteBlockIds: [[1, 2]] }).reads;
  expect([...(read?.localIds ?? [])]).toEqual([4, 5, 14, 15]);
  expect([...(read?.remoteIds ?? [])]).toEqual([1, 2, 11, 12]);
  expect(read?.lengthBytes).toBe(4 * 512);
});

test("a full prefix hit reads nothing, notifies every waiting rank, and needs no remote block lists", () => {
  const remotes = Array.from({ length: 8 }, (_, tpRank) => sampleRank({ tpRank, tpSize: 8 }));
  const plan = samplePlan({}, {}, { remotes });
  const request = planRequest(plan, { localBlockIds: [[]], remoteBlockIds: [[1, 2]] });
  expect(request).toMatchObject({ reads: [], receivePass: undefined, descriptorCount: 0 });
  expect([...request.notifyRanks].sort()).toEqual([0, 1, 2, 3, 4, 5, 6, 7]);
  expect(planRequest(plan, { localBlockIds: [], remoteBlockIds: [[1]] }).notifyRanks).toHaveLength(
    8,
  );
  expect(planRequest(equal, { localBlockIds: [[]], remoteBlockIds: [] })).toMatchObject({
    reads: [],
    notifyRanks: [0],
    runCount: 0,
    lengthBytes: 0,
  });
});

test("computed blocks give the start of the local blocks, also with different block sizes", () => {
  // 5 prefill blocks of 16 hold 80 tokens; decode has the first 32 and wants the rest in two blocks
  // of 32.
  const blocks = { localBlockIds: [[6, 7]], remoteBlockIds: [[0, 1, 2, 3, 4]], numTokens: 80 };
  const expected = [
    [12, 13, 14],
    [2, 3, 4],
  ];
  expect(ids(wider, { ...blocks, localComputedBlocks: [1] })).toEqual(expected);
  expect(ids(wider, blocks)).toEqual(expected);
});

test("does not read kernel blocks after the last token", () => {
  const rank = sampleRank({ physicalBlocksPerLogical: 2 });
  const plan = samplePlan(rank, rank);
  expect(ids(plan, { localBlockIds: [[3]], remoteBlockIds: [[1]], numTokens: 16 })).toEqual([
    [6],
    [2],
  ]);
});

test("aligns a window's list at the last token", () => {
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
  expect(
    ids(windowed, { localBlockIds: [[7]], remoteBlockIds: [[1, 2, 3]], numTokens: 90 }),
  ).toEqual([[7], [3]]);
});

describe("a window with fewer remote blocks", () => {
  // Blocks of 32 tokens here, of 16 there: 90 tokens end in the third block here, in the sixth
  // there.
  const plan = samplePlan({ kernelBlockSize: 32 }, {}, { groups: ["swa"] });

  test("zeroes the blocks before the remote's window and the start of its first block", () => {
    const blocks = { localBlockIds: [[6, 7, 8]], remoteBlockIds: [[1, 2, 3]], numTokens: 90 };
    expect(planRequest(plan, blocks).receivePass?.groups).toEqual([
      {
        group: 0,
        permuteBlockIds: Int32Array.of(7, 8),
        zeroBlockIds: Int32Array.of(6),
        leadingBlock: { blockId: 7, untilToken: 16 },
        partialBlock: { blockId: 8, fromToken: 26 },
      },
    ]);
  });

  test("refuses a local block listed both before the window and within it", () => {
    const twice = (localBlockIds: number[]) => () =>
      planRequest(plan, {
        localBlockIds: [localBlockIds],
        remoteBlockIds: [[1, 2, 3]],
        numTokens: 90,
      });
    expect(twice([8, 7, 8])).toThrow(
      "local block 8 is listed both before the remote's window and within it",
    );
    expect(twice([7, 7, 8])).toThrow("local block 7 is listed both");
    // Of what is zeroed one block may stand for several: it holds nothing.
    const few = { remoteBlockIds: [[3]], numTokens: 90 };
    expect(
      planRequest(plan, { ...few, localBlockIds: [[0, 0, 8]] }).receivePass?.groups,
    ).toMatchObject([
      { zeroBlockIds: Int32Array.of(0, 0), leadingBlock: { blockId: 8, untilToken: 16 } },
    ]);
  });
});

test("sources with equal indices share the arrays", () => {
  const remotes = [0, 1].map((tpRank) => sampleRank({ tpRank, tpSize: 2 }));
  const plan = samplePlan({}, {}, { remotes });
  const request = planRequest(plan, { localBlockIds: [[4, 5]], remoteBlockIds: [[1, 2]] });
  const [one, other] = request.reads;
  expect([...(other?.localIds ?? [])]).toEqual([4, 5, 14, 15]);
  expect(other?.localIds).toBe(one?.localIds);
  // Two sources, two regions, two blocks, of which each gives two of four heads.
  expect(request).toMatchObject({
    descriptorCount: 8,
    runCount: 4,
    lengthBytes: 8 * 256,
    notify: [],
  });
});

describe("groups in regions of their own", () => {
  const own = (change: Parameters<typeof sampleRank>[0] = {}) => ownGroups(sampleRank(change));

  test("leaves out a group without blocks", () => {
    const plan = samplePlan(own(), own(), { groups: ["full", "full"] });
    const request = planRequest(plan, {
      localBlockIds: [[], [3]],
      remoteBlockIds: [[1], [2]],
      numTokens: 5,
    });
    expect(request.reads.map(({ runs }) => [...runs])).toEqual([[13, 12, 1]]);
    expect(request.receivePass?.groups).toEqual([
      {
        group: 1,
        permuteBlockIds: new Int32Array(0),
        zeroBlockIds: new Int32Array(0),
        partialBlock: { blockId: 3, fromToken: 5 },
      },
    ]);
  });

  test("a stage without blocks of the request is only notified", () => {
    const all = own();
    const stage = (ppRank: number) => ({
      ...all,
      ppRank,
      ppSize: 2,
      regions: all.regions.slice(ppRank, ppRank + 1),
    });
    const plan = samplePlan(all, stage(0), {
      groups: ["full", "full"],
      remotes: [stage(0), stage(1)],
    });
    const told = [0, 1].map((group) => {
      const ids = [0, 1].map((one) => (one === group ? [1] : []));
      const { reads, notify, notifyRanks } = planRequest(plan, {
        localBlockIds: ids,
        remoteBlockIds: ids,
      });
      return [reads.map(({ remotePpRank }) => remotePpRank), notify, notifyRanks];
    });
    expect(told).toEqual([
      [[0], [{ tpRank: 0, ppRank: 1 }], [0]],
      [[1], [{ tpRank: 0, ppRank: 0 }], [0]],
    ]);
  });

  test("refuses blocks of a group without regions", () => {
    const only = withRegions(sampleRank(), () => ({ groupIds: [0] }));
    const plan = samplePlan(only, only, { groups: ["full", "swa"] });
    expect(
      planRequest(plan, { localBlockIds: [[1], []], remoteBlockIds: [[1], []] }).reads,
    ).toHaveLength(1);
    expect(() =>
      planRequest(plan, { localBlockIds: [[1], [2]], remoteBlockIds: [[1], [2]] }),
    ).toThrow("group 1 has blocks, and no region");
  });

  test("names a repeated block by its kernel block id in the group", () => {
    const states = { stateSpace: { convBytes: 32, recurrentBytes: 64 } };
    const plan = samplePlan(own({ ...states, kernelBlockSize: 32 }), own(states), {
      groups: ["full", "mamba"],
    });
    const attempt =
      (localBlockIds: readonly number[][], remoteBlockIds: readonly number[][]) => () =>
        planRequest(plan, { localBlockIds, remoteBlockIds, numTokens: 64 });
    expect(attempt([[3, 3], []], [[1, 2, 3, 4], []])).toThrow(
      "local kernel block 3 is to be filled twice",
    );
    expect(attempt([[], [3, 3]], [[], [1, 2]])).toThrow(
      "local kernel block 3 is to be filled twice",
    );
  });
});

describe("DCP", () => {
  const latents = (change: Parameters<typeof sampleRank>[0]) =>
    sampleRank({ blockLengthBytes: 1024, ...change });

  test("each source has its own blocks, and one without blocks is only notified", () => {
    const remotes = [0, 1].map((tpRank) => latents({ tpRank, tpSize: 2, dcpSize: 2 }));
    const plan = samplePlan(latents({}), undefined, { groups: ["mla"], remotes });
    const both = planRequest(plan, {
      localBlockIds: [[5, 6, 7]],
      remoteBlockIds: [[1, 2]],
      numTokens: 48,
    });
    expect(both.reads.map(({ remoteRank, runs }) => [remoteRank, ...runs])).toEqual([
      [0, 5, 1, 1, 7, 2, 1, 15, 11, 1, 17, 12, 1],
      [1, 6, 1, 1, 16, 11, 1],
    ]);
    expect(both).toMatchObject({
      descriptorCount: 6,
      runCount: 6,
      lengthBytes: 6 * 1024,
      notify: [],
    });
    const one = planRequest(plan, { localBlockIds: [[5]], remoteBlockIds: [[1]], numTokens: 16 });
    expect(one.reads.map(({ remoteRank }) => remoteRank)).toEqual([0]);
    expect(one.notify).toEqual([{ tpRank: 1, ppRank: 0 }]);
  });
});

test("notifies unread copies at every stage", () => {
  const rank = sampleRank({ blockLengthBytes: 1024 });
  const stage = (ppRank: number) =>
    [0, 1].map((tpRank) => ({
      ...rank,
      tpRank,
      tpSize: 2,
      ppRank,
      ppSize: 2,
      regions: rank.regions.slice(ppRank, ppRank + 1),
    }));
  const plan = samplePlan(rank, rank, { groups: ["mla"], remotes: [...stage(0), ...stage(1)] });
  const { reads, notify } = planRequest(plan, { localBlockIds: [[1]], remoteBlockIds: [[1]] });
  expect(reads.map(({ remoteRank, remotePpRank }) => [remoteRank, remotePpRank])).toEqual([
    [0, 0],
    [0, 1],
  ]);
  expect(notify).toEqual([
    { tpRank: 1, ppRank: 0 },
    { tpRank: 1, ppRank: 1 },
  ]);
});

test("blocks that are full, and an engine that masks, need no pass", () => {
  const full = { localBlockIds: [[6, 7]], remoteBlockIds: [[1, 2]], numTokens: 32 };
  expect(planRequest(equal, full).receivePass).toBeUndefined();
  const masks = samplePlan({}, {}, { masksUncovered: true });
  expect(planRequest(masks, { ...full, numTokens: 20 }).receivePass).toBeUndefined();
});

test("counts the runs after ordering, over all regions", () => {
  const request = planRequest(equal, {
    localBlockIds: [[9, 8, 7, 3]],
    remoteBlockIds: [[5, 4, 3, 9]],
  });
  expect(request).toMatchObject({ descriptorCount: 8, runCount: 4 });
});

test.each<[string, EngineTransferPlan, RequestBlocks, KvErrorCode, string]>([
  [
    "too few groups",
    equal,
    { localBlockIds: [[1]], remoteBlockIds: [] },
    "KV_BLOCKS_MISMATCH",
    "remote block ids of 0 KV cache groups are given, the engine has 1",
  ],
  [
    "too many groups",
    equal,
    { localBlockIds: [[1], []], remoteBlockIds: [[1]] },
    "KV_BLOCKS_MISMATCH",
    "local block ids of 2 KV cache groups",
  ],
  [
    "zero tokens",
    equal,
    { localBlockIds: [[1]], remoteBlockIds: [[1]], numTokens: 0 },
    "KV_BLOCKS_MISMATCH",
    "numTokens is 0",
  ],
  [
    "a negative number of computed blocks",
    equal,
    { localBlockIds: [[1]], remoteBlockIds: [[1]], localComputedBlocks: [-1] },
    "KV_BLOCKS_MISMATCH",
    "localComputedBlocks of group 0 is -1",
  ],
  [
    "a local block out of range",
    equal,
    { localBlockIds: [[10]], remoteBlockIds: [[1]] },
    "KV_BLOCKS_OUT_OF_RANGE",
    "local block 10 is not among the 10 blocks",
  ],
  [
    "a remote block out of range",
    equal,
    { localBlockIds: [[1]], remoteBlockIds: [[-1]] },
    "KV_BLOCKS_OUT_OF_RANGE",
    "remote block -1",
  ],
  [
    "a fractional block id",
    equal,
    { localBlockIds: [[1]], remoteBlockIds: [[1.5]] },
    "KV_BLOCKS_OUT_OF_RANGE",
    "remote block 1.5",
  ],
  [
    "a repeated local block",
    equal,
    { localBlockIds: [[3, 3]], remoteBlockIds: [[1, 2]] },
    "KV_BLOCKS_OUT_OF_RANGE",
    "block 3 is to be filled twice",
  ],
])("refuses %s", (_what, plan, blocks, code, message) => {
  refused(() => planRequest(plan, blocks), code, message);
});
