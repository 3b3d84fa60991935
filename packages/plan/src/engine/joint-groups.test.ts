import { describe, expect, test } from "vitest";
import type { ModelGeometry, RankGeometry } from "../geometry/rank-geometry.js";
import { buildEngineTransferPlan, joinGroups, planRequest } from "../index.js";
import { provePlan } from "../prove/index.js";
import { refused } from "../refused.test-support.js";
import { sampleRank } from "../sample-pair.test-support.js";

const MLA: ModelGeometry = { numKvHeads: 1, groups: ["mla", "swa-mla"] };

/** A rank whose regions are of these groups. */
function rank(groupIds: readonly number[], change: Partial<RankGeometry> = {}): RankGeometry {
  const [sample] = sampleRank().regions as [RankGeometry["regions"][number]];
  const bytes = { blockLengthBytes: 64, blockStrideBytes: 64 };
  return {
    ...sampleRank({ kernelBlockSize: 4, layout: "LBNHC", attentionBackend: "FLASHMLA" }),
    regions: groupIds.map((groupId, index) => ({
      ...sample,
      ...bytes,
      name: `layers.${index}`,
      baseAddress: 65_536 * (index + 1),
      numBlocks: 32,
      groupId,
    })),
    ...change,
  };
}

const join = (mine: readonly number[], theirs: readonly number[], model: ModelGeometry = MLA) =>
  joinGroups({ local: rank(mine), remotes: [rank(theirs)], ...model });

describe("joint groups", () => {
  test("are the pairs of local and remote groups, in order, with each side's kind and tokens per block", () => {
    const joint = joinGroups({
      local: rank([1, 0, 0, 1], { groupBlockTokens: [4, 8] }),
      remotes: [rank([0, 0, 1, 0], { groupBlockTokens: [16, 32] })],
      ...MLA,
    });
    expect(joint?.pairs).toEqual([
      [0, 0],
      [0, 1],
      [1, 0],
    ]);
    expect(joint?.local.regions.map(({ groupId }) => groupId)).toEqual([2, 0, 1, 2]);
    expect(joint?.remotes[0]?.regions.map(({ groupId }) => groupId)).toEqual([2, 0, 1, 2]);
    expect(joint?.model.groups).toEqual(["mla", "mla", "swa-mla"]);
    expect(joint?.local.groupBlockTokens).toEqual([4, 4, 8]);
    expect(joint?.remotes[0]?.groupBlockTokens).toEqual([16, 32, 16]);
  });

  test("are sorted by the local group, then by the remote group", () => {
    expect(join([1, 1, 0, 0], [2, 0, 1, 0])?.pairs).toEqual([
      [0, 0],
      [0, 1],
      [1, 0],
      [1, 2],
    ]);
  });

  test("make a plan that is proven, with and without pipeline stages", () => {
    const groups = ["mla"];
    const stages = [rank([0, 0, 1]), rank([0, 0, 1])].map((one, ppRank) => ({
      ...one,
      ppRank,
      ppSize: 2,
      regions: one.regions.filter((_, index) => (index === 0) === (ppRank === 0)),
    }));
    for (const remotes of [[rank([0, 0, 1])], stages]) {
      const joint = joinGroups({ local: rank([0, 0, 0]), remotes, numKvHeads: 1, groups });
      if (joint === undefined) return expect.fail("no joint groups");
      const plan = buildEngineTransferPlan({
        local: joint.local,
        remotes: joint.remotes,
        ...joint.model,
      });
      const blocks = joint.blocks({
        localBlockIds: [[7, 3]],
        remoteBlockIds: [
          [4, 5, 6],
          [9, 8, 1],
        ],
        localComputedBlocks: [1],
        numTokens: 11,
      });
      expect(blocks.localComputedBlocks).toEqual([1, 1]);
      const requests = [{ blocks, plan: planRequest(plan, blocks) }];
      expect(provePlan(plan, { remotes: joint.remotes, numKvHeads: 1, requests })).toMatchObject({
        proven: true,
      });
      expect(requests[0]?.plan.descriptorCount).toBe(6);
    }
  });

  test("return a request without blocks unchanged, and refuse a wrong number of block lists", () => {
    const joint = join([0, 0, 1], [0, 1, 1]);
    const nothing = { localBlockIds: [[], []], remoteBlockIds: [] };
    expect(joint?.blocks(nothing)).toBe(nothing);
    for (const [localBlockIds, remoteBlockIds, said] of [
      [
        [[1]],
        [[1], [1]],
        "local block ids of 1 KV cache groups are given, the regions of that side have 2 groups",
      ],
      [
        [[1], [1]],
        [[1], [1], [1]],
        "remote block ids of 3 KV cache groups are given, the regions of that side have 2 groups",
      ],
    ] as const) {
      const attempt = () => joint?.blocks({ localBlockIds, remoteBlockIds });
      refused(attempt, "KV_BLOCKS_MISMATCH", said);
    }
    expect(joint?.blocks({ localBlockIds: [[1], []], remoteBlockIds: [[2], [3]] })).toEqual({
      localBlockIds: [[1], [1], []],
      remoteBlockIds: [[2], [3], [3]],
    });
  });

  test.each([
    ["the groups are equal on both sides", [0, 0, 1], [0, 0, 1], MLA],
    ["a local region is shared by several groups", [0, -1, 1], [0, 1, 1], MLA],
    ["a remote region is shared by several groups", [0, 0, 1], [0, -1, 1], MLA],
    ["a local region is shared and one group has no region of its own", [-1, 1, 1], [0, 1, 1], MLA],
    [
      "a remote region is shared and one group has no region of its own",
      [0, 0, 1],
      [-1, 1, 1],
      MLA,
    ],
    ["a group id is not an integer", [0.5, 1, 1], [0, 1, 1], MLA],
    ["all local regions have one group id", [0, 0, 0], [0, 1, 1], MLA],
    ["a remote group has no region", [0, 0, 1], [0, 2, 2], MLA],
    ["the remote lacks a region", [0, 0, 1, 1], [0, 1, 1], MLA],
    ["the model has heads", [0, 0, 1], [0, 1, 1], { numKvHeads: 1, groups: ["mla", "full"] }],
    ["the model has scratch", [0, 0, 1], [0, 1, 1], { numKvHeads: 1, groups: ["mla", "circular"] }],
  ])("are undefined when %s", (_, mine, theirs, model) => {
    expect(join(mine, theirs, model)).toBeUndefined();
  });

  test("are undefined when rows are packed or a region lists the groups that share it", () => {
    const packedMembers = { "layers.0": { offsetBytes: 0, lengthBytes: 64 } };
    const [mine, theirs] = [rank([0, 0, 1]), rank([0, 1, 1])];
    expect(
      joinGroups({ local: mine, remotes: [{ ...theirs, packedMembers }], ...MLA }),
    ).toBeUndefined();
    const [first, ...others] = mine.regions as [RankGeometry["regions"][number]];
    const shared = { ...mine, regions: [{ ...first, groupIds: [0, 1] }, ...others] };
    expect(joinGroups({ local: shared, remotes: [theirs], ...MLA })).toBeUndefined();
    // Then the plan says why.
    const plan = () => buildEngineTransferPlan({ local: mine, remotes: [theirs], ...MLA });
    const said = 'region "layers.1" is in different KV cache groups';
    refused(plan, "KV_PLAN_UNSUPPORTED", said);
  });
});
