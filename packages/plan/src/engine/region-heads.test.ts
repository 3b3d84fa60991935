import { describe, expect, test } from "vitest";
import type { ModelGeometry, RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import { refused } from "../refused.test-support.js";
import { sampleRank } from "../sample-pair.test-support.js";
import { groupsOfRegion, headsInBlock, headsInRegion, kernelTokens } from "./region-heads.js";

/** A rank with one region for each change; `at` returns a region. */
function rankOf(
  changes: readonly Partial<RegionGeometry>[],
): RankGeometry & { at(index: number): RegionGeometry } {
  const rank = sampleRank();
  const [first] = rank.regions as [RegionGeometry];
  const regions = changes.map((change) => ({ ...first, ...change }));
  return { ...rank, regions, at: (index) => regions[index] as RegionGeometry };
}
const model = (groups: readonly string[], change: Partial<ModelGeometry> = {}): ModelGeometry => ({
  numKvHeads: 8,
  groups,
  ...change,
});

describe("groups of a region", () => {
  const three = model(["full", "swa", "mamba"]);
  test("are all groups when all regions have the same group id", () => {
    const rank = rankOf([{ groupId: 1 }, { groupId: 1 }]);
    expect(groupsOfRegion(rank, rank.at(0), three)).toEqual([0, 1, 2]);
  });

  test("are the region's own group when group ids differ, and all groups for a shared region", () => {
    const rank = rankOf([{ groupId: 0 }, { groupId: 2 }, { groupId: -1 }]);
    const groups = [0, 1, 2].map((index) => groupsOfRegion(rank, rank.at(index), three));
    expect(groups).toEqual([[0], [2], [0, 1, 2]]);
  });

  test("are the groups in groupIds when the region has them", () => {
    const rank = rankOf([{ groupId: -1, groupIds: [0, 2] }, { groupId: -1 }]);
    expect(groupsOfRegion(rank, rank.at(0), three)).toEqual([0, 2]);
  });
});

describe("heads of a region", () => {
  const heads = (
    own: Partial<RegionGeometry>,
    groups: readonly string[],
    change: Partial<ModelGeometry> = {},
  ) => {
    const rank = rankOf([own]);
    return headsInRegion(rank, rank.at(0), model(groups, change));
  };

  test.each<[string, number | undefined, Parameters<typeof heads>]>([
    ["the model's heads", 8, [{}, ["full"]]],
    ["the region's own numKvHeads", 3, [{ numKvHeads: 3 }, ["full"]]],
    ["none for a replicated region", undefined, [{ replicated: true, numKvHeads: 3 }, ["full"]]],
    ["none for MLA groups", undefined, [{}, ["mla", "swa-mla"]]],
    ["none for MLA and state groups together", undefined, [{}, ["mamba", "mla"]]],
    ["the model's heads when one group has heads", 8, [{}, ["mla", "full"]]],
    ["the model's heads for a region that is not replicated", 8, [{ replicated: false }, ["mla"]]],
    ["the model's heads for states alone", 8, [{}, ["mamba"]]],
    ["none for replicated states", undefined, [{ replicated: true }, ["mamba"]]],
    ["the heads of its group", 5, [{}, ["full", "swa"], { groupKvHeads: [5, 4] }]],
    [
      "the largest head count of its groups",
      4,
      [{}, ["mla", "full", "swa"], { groupKvHeads: [5, 3, 4] }],
    ],
    [
      "the model's heads when only MLA groups list heads",
      8,
      [{ replicated: false }, ["mla", "mla"], { groupKvHeads: [5, 4] }],
    ],
  ])("%s", (_what, expected, given) => {
    expect(heads(...given)).toBe(expected);
  });
});

describe("heads in a block", () => {
  test.each([
    [4, 2, 2],
    [4, 4, 1],
    [4, 8, 1],
    [undefined, 2, 1],
  ])("%s heads on %i ranks: %i", (heads, tpSize, expected) => {
    expect(headsInBlock(sampleRank({ tpSize }), heads)).toBe(expected);
  });
});

describe("tokens in a kernel block of a group", () => {
  const rank = sampleRank({ physicalBlocksPerLogical: 2, groupBlockTokens: [32, 64, 33] });
  test("are the engine's, or the group's own", () => {
    expect(kernelTokens(sampleRank({ physicalBlocksPerLogical: 2 }), 0)).toBe(16);
    expect([0, 1].map((group) => kernelTokens(rank, group))).toEqual([16, 32]);
  });

  test("must divide into kernel blocks", () => {
    refused(
      () => kernelTokens(rank, 2),
      "KV_PLAN_INVALID",
      "group 2: blocks of 33 tokens do not divide into 2 kernel blocks",
    );
  });
});
