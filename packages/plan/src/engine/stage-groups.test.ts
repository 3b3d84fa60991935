import { expect, test } from "vitest";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import { planRequest } from "../request/request-plan.js";
import { sampleRank } from "../sample-pair.test-support.js";
import { buildEngineTransferPlan } from "./engine-plan.js";
import { withStageGroups } from "./stage-groups.js";

/** Of the sample's two regions, those of some of the groups; region n is of group n. */
function rankOf(groups: readonly number[], place: Partial<RankGeometry> = {}): RankGeometry {
  const rank = sampleRank(place);
  const regions = rank.regions.map((region, groupId) => ({ ...region, groupId }));
  return { ...rank, regions: regions.filter(({ groupId }) => groups.includes(groupId)) };
}

const stage = (ppRank: number) => rankOf([ppRank], { ppRank, ppSize: 2 });

test("a stage with the layers of one group has no other group's, where the whole rank has regions of several", () => {
  const said = (local: RankGeometry, remote: RankGeometry) =>
    withStageGroups(local, [remote]).regions.map(({ groupIds }) => groupIds);
  expect(said(stage(1), rankOf([0, 1]))).toEqual([[1]]);
  expect(said(rankOf([0, 1]), rankOf([0, 1]))).toEqual([undefined, undefined]);
  // All groups in all regions.
  expect(said(stage(0), rankOf([0]))).toEqual([undefined]);
  const shared = (rank: RankGeometry) => ({
    ...rank,
    regions: rank.regions.map((region) => ({ ...region, groupId: -1 })),
  });
  expect(said(shared(stage(0)), rankOf([0, 1]))).toEqual([undefined]);
  const [own] = stage(0).regions;
  expect(said({ ...stage(0), regions: own ? [{ ...own, groupIds: [0, 1] }] : [] }, rankOf([0, 1]))).toEqual([
    [0, 1],
  ]);
});

test("each stage moves the blocks of its own groups, and only notifies of a request without any", () => {
  const moved = (ppRank: number, localBlockIds: number[][]) => {
    const plan = buildEngineTransferPlan({
      ...{ local: stage(ppRank), remotes: [rankOf([0, 1])] },
      ...{ numKvHeads: 4, groups: ["full", "full"] },
    });
    const request = planRequest(plan, {
      ...{
        localBlockIds,
        remoteBlockIds: [
          [5, 6],
          [7, 8],
        ],
        numTokens: 20,
        localComputedBlocks: [0, 0],
      },
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
