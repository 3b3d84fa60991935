import type { KvErrorCode } from "@kv/interface";
import { describe, expect, test } from "vitest";
import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import { refused } from "../refused.test-support.js";
import { planRequest } from "../request/request-plan.js";
import { ownGroups, sampleRank, withRegions } from "../sample-pair.test-support.js";
import { alignRegions, withStageGroups } from "./align-regions.js";
import { buildEngineTransferPlan } from "./engine-plan.js";

type Named = string | (Partial<RegionGeometry> & { readonly name: string });

/** A rank with regions of 100 bytes a block, which begin at 1000, 2000 and so on. */
function rankOf(regions: readonly Named[], change: Partial<RankGeometry> = {}): RankGeometry {
  return {
    ...sampleRank(change),
    regions: regions.map((one, index) => ({
      baseAddress: 1000 * (index + 1),
      numBlocks: 4,
      blockLengthBytes: 100,
      blockStrideBytes: 128,
      groupId: index,
      memoryType: "VRAM" as const,
      ...(typeof one === "string" ? { name: one } : one),
    })),
  };
}
const names = ({ regions }: RankGeometry) => regions.map(({ name }) => name);
const STAGE = { ppSize: 2 };

describe("one stage", () => {
  test("keeps both region lists in order without comparing names; a later check compares them", () => {
    const remote = rankOf(["b", "a"]);
    expect(alignRegions(rankOf(["a", "b"]), remote)).toEqual({
      geometry: remote,
      localRegions: [0, 1],
      remoteRegions: [0, 1],
    });
  });
});

describe("stages of a pipeline", () => {
  const local = rankOf(["a", "b", "c"]);

  test("matches a stage's layers by name and returns them in local order", () => {
    const { geometry, localRegions, remoteRegions } = alignRegions(
      local,
      rankOf(["c", "b"], STAGE),
    );
    expect([localRegions, remoteRegions]).toEqual([
      [1, 2],
      [1, 0],
    ]);
    expect(geometry.ppSize).toBe(2);
    // These are the remote's regions; "b" is its second.
    expect(
      geometry.regions.map(({ name, baseAddress, groupId }) => [name, baseAddress, groupId]),
    ).toEqual([
      ["b", 2000, 1],
      ["c", 1000, 0],
    ]);
  });

  test("matches layers that are members of regions with other names", () => {
    const remote = rankOf(
      [
        { name: "row.0", members: ["c"] },
        { name: "row.1", members: ["b", "row.1"] },
      ],
      STAGE,
    );
    const { geometry, localRegions, remoteRegions } = alignRegions(local, remote);
    expect([localRegions, remoteRegions, names(geometry)]).toEqual([
      [1, 2],
      [1, 0],
      ["b", "c"],
    ]);
  });

  test("matches a local stage by name with a remote rank that has all layers", () => {
    const { geometry, localRegions, remoteRegions } = alignRegions(rankOf(["b"], STAGE), local);
    expect([localRegions, remoteRegions, names(geometry)]).toEqual([[0], [1], ["b"]]);
  });
});

describe("rows that pack several layers", () => {
  const packedMembers = {
    a: { offsetBytes: 0, lengthBytes: 60 },
    b: { offsetBytes: 60, lengthBytes: 40 },
  };

  test("stay as they are when both sides pack the same members, in any order", () => {
    const { a, b } = packedMembers;
    const local = rankOf(["a"], { packedMembers });
    const remote = rankOf(["a"], { packedMembers: { b, a } });
    expect(alignRegions(local, remote)).toEqual({
      geometry: remote,
      localRegions: [0],
      remoteRegions: [0],
    });
  });

  test("become one region per page when the local rank has one region per layer", () => {
    const local = rankOf([
      { name: "a", groupId: 5 },
      { name: "b", groupId: 6 },
    ]);
    const { geometry, localRegions, remoteRegions } = alignRegions(
      local,
      rankOf(["a"], { packedMembers }),
    );
    expect([localRegions, remoteRegions]).toEqual([
      [0, 1],
      [0, 0],
    ]);
    const row = { numBlocks: 4, blockStrideBytes: 128, memoryType: "VRAM" };
    expect(geometry.regions).toEqual([
      { name: "a", baseAddress: 1000, blockLengthBytes: 60, groupId: 5, ...row },
      { name: "b", baseAddress: 1060, blockLengthBytes: 40, groupId: 6, ...row },
    ]);
  });

  test("finds a packed page in the row of its name, else in the first row, and other regions by name", () => {
    const local = rankOf(["indexer", "a", "b"]);
    const remote = rankOf(["indexer", "b", "a"], { packedMembers: { b: packedMembers.b } });
    const { geometry, remoteRegions } = alignRegions(local, remote);
    expect(remoteRegions).toEqual([0, 2, 1]);
    expect(geometry.regions.map(({ name, baseAddress }) => [name, baseAddress])).toEqual([
      ["indexer", 1000],
      ["a", 3000],
      ["b", 2060],
    ]);
    // No region has the name "a": it is in the row.
    const packed = rankOf(["indexer", "b"], { packedMembers });
    expect(alignRegions(local, packed).remoteRegions).toEqual([0, 1, 1]);
  });
});

describe("refuses", () => {
  const packedMembers = {
    a: { offsetBytes: 0, lengthBytes: 60 },
    b: { offsetBytes: 60, lengthBytes: 41 },
  };

  test.each<[string, RankGeometry, RankGeometry, KvErrorCode, string]>([
    [
      "local packed rows without remote ones",
      rankOf(["a"], { packedMembers }),
      rankOf(["a"]),
      "KV_PLAN_INCOMPATIBLE",
      'pack them alike: local ["a","b"], remote []',
    ],
    [
      "packed rows with other offsets",
      rankOf(["a"], { packedMembers }),
      rankOf(["a"], {
        packedMembers: { ...packedMembers, b: { offsetBytes: 61, lengthBytes: 41 } },
      }),
      "KV_PLAN_INCOMPATIBLE",
      "pack them alike",
    ],
    [
      "a page that extends past its row",
      rankOf(["a", "b"]),
      rankOf(["a"], { packedMembers }),
      "KV_PLAN_INVALID",
      '"b": 41 bytes at 60 leave the row of 100 bytes',
    ],
    [
      "one cache in two regions",
      rankOf(["a", "b"]),
      rankOf(["a", { name: "row", members: ["a"] }], STAGE),
      "KV_PLAN_INVALID",
      'cache "a" is in regions 0 and 1',
    ],
    [
      "a stage without any of the layers",
      rankOf(["a", "b"]),
      rankOf(["c"], STAGE),
      "KV_PLAN_INCOMPATIBLE",
      'lacks caches of the local one (matched by name): local ["a","b"], remote ["c"]',
    ],
    [
      "a remote without stages that lacks a layer of the local stage",
      rankOf(["a", "b"], STAGE),
      rankOf(["a", "c"]),
      "KV_PLAN_INCOMPATIBLE",
      'lacks caches of the local one (matched by name): local ["b"], remote ["a","c"]',
    ],
    [
      "packed rows that lack a layer",
      rankOf(["a", "c"]),
      rankOf(["a"], { packedMembers }),
      "KV_PLAN_INCOMPATIBLE",
      'lacks caches of the local one: local ["c"], remote ["a"]',
    ],
  ])("%s", (_what, local, remote, code, message) => {
    refused(() => alignRegions(local, remote), code, message);
  });
});

describe("groups of a local pipeline stage", () => {
  /** The sample's regions that belong to the given groups; region n belongs to group n. */
  function rankOf(groups: readonly number[], place: Partial<RankGeometry> = {}): RankGeometry {
    const rank = ownGroups(sampleRank(place));
    return { ...rank, regions: rank.regions.filter(({ groupId }) => groups.includes(groupId)) };
  }

  const stage = (ppRank: number) => rankOf([ppRank], { ppRank, ppSize: 2 });

  test("a stage has only the groups of its layers when the whole rank's regions have several groups", () => {
    const said = (local: RankGeometry, remote: RankGeometry) =>
      withStageGroups(local, [remote]).regions.map(({ groupIds }) => groupIds);
    expect(said(stage(1), rankOf([0, 1]))).toEqual([[1]]);
    expect(said(rankOf([0, 1]), rankOf([0, 1]))).toEqual([undefined, undefined]);
    // All groups in all regions.
    expect(said(stage(0), rankOf([0]))).toEqual([undefined]);
    const shared = withRegions(stage(0), () => ({ groupId: -1 }));
    expect(said(shared, rankOf([0, 1]))).toEqual([undefined]);
    const named = withRegions(stage(0), () => ({ groupIds: [0, 1] }));
    expect(said(named, rankOf([0, 1]))).toEqual([[0, 1]]);
  });

  test("each stage moves the blocks of its groups, and only notifies when a request has none", () => {
    const moved = (ppRank: number, localBlockIds: number[][]) => {
      const plan = buildEngineTransferPlan({
        local: stage(ppRank),
        remotes: [rankOf([0, 1])],
        numKvHeads: 4,
        groups: ["full", "full"],
      });
      const request = planRequest(plan, {
        localBlockIds,
        remoteBlockIds: [
          [5, 6],
          [7, 8],
        ],
        numTokens: 20,
        localComputedBlocks: [0, 0],
      });
      return {
        regions: plan.regionsOfGroup,
        runs: request.reads.map(({ runs }) => [...runs]),
        told: request.notify.length,
      };
    };
    // The remote's table has a row of blocks for the region of this stage.
    const blocks = [
      [1, 2],
      [3, 4],
    ];
    expect(moved(0, blocks)).toEqual({ regions: [[0], []], runs: [[1, 5, 2]], told: 0 });
    expect(moved(1, blocks)).toEqual({ regions: [[], [0]], runs: [[3, 7, 2]], told: 0 });
    expect(moved(1, [[1, 2], []])).toEqual({ regions: [[], [0]], runs: [], told: 1 });
  });
});
