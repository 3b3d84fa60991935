import { fileURLToPath } from "node:url";
import { KvError } from "@kv/interface";
import { describe, expect, test } from "vitest";
import { replayDescriptorIds } from "./families.js";
import { judge } from "./outcome.js";
import { readVectors } from "./vector-file.js";
import { computeDescriptorIds, type DescriptorIdOptions } from "./vllm-descriptor-ids.js";

/** Three regions of ten blocks. */
const options = (change: Partial<DescriptorIdOptions>): DescriptorIdOptions => ({
  groups: ["full"],
  blockIds: [[4, 2]],
  numRegions: 3,
  numBlocks: 10,
  regionGroupIds: [0, 0, 0],
  ...change,
});
const ids = (change: Partial<DescriptorIdOptions>) => [...computeDescriptorIds(options(change))];
function refusal(change: Partial<DescriptorIdOptions>): { message: string; details: unknown } {
  try {
    computeDescriptorIds(options(change));
  } catch (error) {
    if (KvError.is(error, "KV_PLAN_INVALID"))
      return { message: error.message, details: error.details };
  }
  return expect.fail("nothing was refused");
}

describe("attention", () => {
  test("lists ids by region, and within a region in the order of the blocks", () => {
    expect(ids({})).toEqual([4, 2, 14, 12, 24, 22]);
    expect(ids({ regionNumBlocks: [10, 5, 7] })).toEqual([4, 2, 14, 12, 19, 17]);
    expect(ids({ blockSizeRatio: 2, regionNumBlocks: [10, 5, 7] })).toEqual([4, 2, 24, 22, 34, 32]);
    // Numbers of blocks are rounded down.
    expect(ids({ blockSizeRatio: 0.5, regionNumBlocks: [5, 5, 5] })).toEqual([4, 2, 6, 4, 8, 6]);
  });

  test("lists groups together when they share all regions, else group by group in their own regions", () => {
    const groups = { groups: ["full", "swa"], blockIds: [[1], [2, 3]] };
    expect(ids(groups)).toEqual([1, 2, 3, 11, 12, 13, 21, 22, 23]);
    expect(ids({ ...groups, regionGroupIds: [0, 1, -1] })).toEqual([1, 21, 12, 13, 22, 23]);
    // The caller's setting overrides the groups of the regions.
    expect(
      ids({ ...groups, regionGroupIds: [0, 1, 1], usesRegionGroupMapping: false }),
    ).toHaveLength(9);
    expect(ids({ ...groups, regionGroupIds: [-1, -1, -1], usesRegionGroupMapping: true })).toEqual([
      1, 11, 21, 2, 3, 12, 13, 22, 23,
    ]);
  });

  test("a single region needs no group; each of several regions needs one", () => {
    expect(
      computeDescriptorIds({ groups: ["full"], blockIds: [[3]], numRegions: 1, numBlocks: 10 }),
    ).toEqual(Int32Array.of(3));
    const { regionGroupIds: _, ...nameless } = options({});
    expect(() => computeDescriptorIds(nameless)).toThrow(
      "0 regions with a group, but 3 regions with a block count",
    );
    expect(refusal({ regionGroupIds: [0, 0] })).toEqual({
      message: "2 regions with a group, but 3 regions with a block count",
      details: { "regions with a group": 2, "regions with a block count": 3 },
    });
  });

  test("refuses a group with blocks and without a region", () => {
    const groups = { groups: ["full", "swa"], regionGroupIds: [0, 0, 2] };
    expect(ids({ ...groups, blockIds: [[1], []] })).toEqual([1, 11]);
    expect(refusal({ ...groups, blockIds: [[1], [2, 3]] })).toEqual({
      message: "group 1 has 2 blocks and no region to hold them",
      details: { group: 1, regionGroups: [0, 0, 2] },
    });
  });
});

test("refuses kernel blocks that do not fill logical ones, and a block beyond its region, in every kind of cache", () => {
  expect(refusal({ numBlocks: 13, physicalBlocksPerLogical: 3 }).message).toBe(
    "13 kernel blocks do not divide into logical blocks of 3",
  );
  expect(refusal({ blockIds: [[4, 40]] }).message).toBe("block 40 is not one of 10 blocks");
});

describe("by layer", () => {
  const layers = {
    groups: ["full", "swa"],
    blockIds: [[1, 2], [3]],
    transferLayerGroupIds: [1, 0, 1, 0],
  };

  test("each layer has its own region with the blocks of its group", () => {
    expect(ids(layers)).toEqual([3, 11, 12, 23, 31, 32]);
    expect(ids({ ...layers, regionNumBlocks: [5, 6, 7, 8] })).toEqual([3, 6, 7, 14, 19, 20]);
    expect(ids({ ...layers, transferLayerGroupIds: [] })).toHaveLength(9);
  });

  test("refuses a layer without a block count, and a layer of an unknown group", () => {
    expect(refusal({ ...layers, regionNumBlocks: [5, 6, 7] }).message).toBe(
      "3 regions with a block count, but 4 layers",
    );
    expect(refusal({ ...layers, transferLayerGroupIds: [0, 2] }).message).toBe(
      "a layer names group 2, block ids are given for 2 groups",
    );
  });
});

describe("hybrids", () => {
  const hybrid = {
    groups: ["full", "mamba"],
    blockIds: [[4, 5], [1]],
    numRegions: 2,
    numBlocks: 12,
  };
  const counts = { regionNumBlocks: [12, 12] };
  const stateSpace = { convProjections: 3 };

  test("states follow all attention blocks: a logical block for each projection and for the recurrent state", () => {
    expect(ids({ ...hybrid, ...counts, stateSpace, physicalBlocksPerLogical: 3 })).toEqual([
      4,
      5,
      16,
      17,
      // Two regions of four pieces, each of four logical blocks.
      ...[24, 28, 32, 36, 40, 44, 48, 52].map((begin) => begin + 1),
    ]);
    expect(ids({ ...hybrid, ...counts, stateSpace }).slice(4)).toEqual(
      [0, 1, 2, 3, 4, 5, 6, 7].map((piece) => 24 + piece * 12 + 1),
    );
  });

  test("only state regions have state descriptors", () => {
    const some = { ...stateSpace, regions: [1] };
    expect(ids({ ...hybrid, ...counts, stateSpace: some })).toHaveLength(4 + 4);
    expect(ids({ ...hybrid, ...counts, stateSpace: { ...stateSpace, regions: [] } })).toHaveLength(
      4 + 8,
    );
  });

  test("a block size ratio splits attention blocks, not states", () => {
    expect(
      ids({ ...hybrid, ...counts, stateSpace, blockSizeRatio: 2, physicalBlocksPerLogical: 3 }),
    ).toEqual([4, 5, 28, 29, ...[0, 1, 2, 3, 4, 5, 6, 7].map((piece) => 48 + piece * 4 + 1)]);
  });

  test("circular scratch blocks are only in scratch regions", () => {
    const groups = { groups: ["full", "mamba", "circular"], blockIds: [[4], [1], [5, 6]] };
    const found = ids({ ...hybrid, ...counts, ...groups, stateSpace, scratchRegions: [1] });
    expect([...found.slice(0, 2), ...found.slice(-2)]).toEqual([4, 16, 17, 18]);
    expect(ids({ ...hybrid, ...counts, ...groups, stateSpace })).toHaveLength(2 + 8);
  });

  test("refuses kernel blocks that do not fill whole logical blocks, and names both numbers", () => {
    expect(
      refusal({
        ...hybrid,
        numBlocks: 10,
        regionNumBlocks: [10, 10],
        stateSpace,
        physicalBlocksPerLogical: 3,
      }),
    ).toEqual({
      message: "10 kernel blocks do not divide into logical blocks of 3",
      details: { numBlocks: 10, physicalBlocksPerLogical: 3 },
    });
  });

  test("refuses a state-space group without the number of convolution projections", () => {
    expect(refusal({ ...hybrid, ...counts }).message).toMatch(
      /needs the number of its convolution projections/,
    );
  });
});

test("equals vLLM 0.33.0's _compute_desc_ids in every recorded case", () => {
  const path = fileURLToPath(new URL("./fixtures/desc_ids.jsonl.gz", import.meta.url));
  const outcomes = readVectors(path, []).map(({ line, vector }) => ({
    line,
    ...(vector === undefined ? { kind: "unread" } : judge("desc_ids", replayDescriptorIds, vector)),
  }));
  expect(outcomes.filter(({ kind }) => kind !== "passed")).toEqual([]);
  expect(outcomes.length).toBeGreaterThan(1000);
});
