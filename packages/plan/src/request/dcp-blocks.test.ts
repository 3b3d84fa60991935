import { describe, expect, test } from "vitest";
import { buildEngineTransferPlan, type EngineTransferPlan } from "../engine/engine-plan.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import { provePlan } from "../prove/prove-plan.js";
import { refusal, refused } from "../refused.test-support.js";
import { sampleRank, withRegions } from "../sample-pair.test-support.js";
import type { RequestBlocks } from "./request-blocks.js";
import { pairRequest, planRequest } from "./request-plan.js";
import { requestShape } from "./request-read.js";

const remotes = [0, 1].map((tpRank) =>
  sampleRank({ blockLengthBytes: 1024, tpSize: 2, dcpSize: 2, tpRank }),
);

/** Latents in blocks of 16 tokens; the remote's are dealt out to two ranks. */
function planOf(
  local: Parameters<typeof sampleRank>[0] = {},
  groups: readonly string[] = ["mla"],
): EngineTransferPlan {
  const inGroups = (rank: RankGeometry) =>
    withRegions(rank, (_, index) => ({ groupId: index % groups.length }));
  return buildEngineTransferPlan({
    local: inGroups(sampleRank({ blockLengthBytes: 1024, ...local })),
    remotes: remotes.slice(0, local.dcpSize === 2 ? 1 : 2).map(inGroups),
    numKvHeads: 1,
    groups,
  });
}

/** A request of one group. */
const asked = (
  local: readonly number[],
  remote: readonly number[],
  numTokens: number,
): RequestBlocks => ({ localBlockIds: [local], remoteBlockIds: [remote], numTokens });

/** By source, the rows of each of its batches; and the pass in plain numbers. */
function pairsOf(plan: EngineTransferPlan, blocks: RequestBlocks) {
  const { rows, pass } = pairRequest(plan, requestShape(plan), blocks);
  return {
    rows: rows.map((batches) => batches.map((batch) => batch && [...batch])),
    pass: pass.map(({ group, permuteBlockIds, zeroBlockIds, ...rest }) => {
      expect(permuteBlockIds).toHaveLength(0);
      return { group, zero: [...zeroBlockIds], ...rest };
    }),
  };
}

test("zeroes the blocks that the remote lacks when numTokens is unknown", () => {
  const blocks = {
    localBlockIds: [[5, 6, 7, 8]],
    remoteBlockIds: [[1]],
    localComputedBlocks: [0],
  };
  expect(pairsOf(planOf(), blocks)).toStrictEqual({
    rows: [[[5, 1, 1]], [[6, 1, 1]]],
    pass: [{ group: 0, zero: [7, 8] }],
  });
});

test("the same number in two groups is two blocks, and a group without blocks is left out", () => {
  const plan = planOf({}, ["mla", "mla"]);
  const both = { localBlockIds: [[2], [2]], remoteBlockIds: [[1], [7]], numTokens: 9 };
  expect(pairsOf(plan, both).rows[0]).toStrictEqual([
    [2, 1, 1],
    [2, 7, 1],
  ]);
  const second = { ...both, localBlockIds: [[], [2]] };
  expect(pairsOf(plan, second).rows[0]).toStrictEqual([undefined, [2, 7, 1]]);
});

describe("without a known prefix hit, both lists end at the same block", () => {
  const slice = planOf({ tpSize: 2, dcpSize: 2 });
  test.each<[string, EngineTransferPlan, RequestBlocks, number]>([
    ["no DCP here", planOf(), asked([7, 8], [1, 2, 3], 77), 3],
    ["DCP on both sides", slice, asked([7, 8], [1, 2, 3], 77), 1],
    [
      "DCP on both sides, tokens unknown",
      slice,
      { localBlockIds: [[7]], remoteBlockIds: [[1, 2, 3]] },
      2,
    ],
  ])("%s", (_what, plan, blocks, computed) => {
    const told = { ...blocks, localComputedBlocks: [computed] };
    expect(pairsOf(plan, blocks)).toStrictEqual(pairsOf(plan, told));
    const proven = (given: RequestBlocks) => {
      const requests = [{ blocks, plan: planRequest(plan, given) }];
      return provePlan(plan, { remotes, numKvHeads: 1, requests }).proven;
    };
    expect([proven(told), proven({ ...blocks, localComputedBlocks: [0] })]).toEqual([true, false]);
  });
});

describe("refuses", () => {
  test("a repeated local block, filled by one source or by two", () => {
    const twice = (ids: readonly number[]) => () =>
      pairsOf(planOf(), {
        localBlockIds: [ids],
        remoteBlockIds: [[1, 2]],
        numTokens: ids.length * 16,
      });
    refused(twice([5, 6, 5]), "KV_BLOCKS_OUT_OF_RANGE", "local block 5 is to be filled twice");
    refused(twice([5, 5]), "KV_BLOCKS_OUT_OF_RANGE", "local block 5 is to be filled twice");
  });

  test("a list with an ambiguous start", () => {
    const attempt = (blocks: RequestBlocks) => () => pairsOf(planOf(), blocks);
    const lists = { localBlockIds: [[5, 6]], remoteBlockIds: [[1]] };
    refused(
      attempt(lists),
      "KV_BLOCKS_MISMATCH",
      "2 local blocks (DCP 1) and 1 remote ones (DCP 2) the number of blocks before the local ones is ambiguous (tokens: unknown",
    );
    refused(
      attempt({ ...lists, numTokens: 16 }),
      "KV_BLOCKS_MISMATCH",
      "2 local blocks (DCP 1) and 1 remote ones (DCP 2) the number of blocks before the local ones is ambiguous (tokens: 16",
    );
    expect(refusal(attempt({ ...lists, numTokens: 16 })).details).toEqual({
      group: 0,
      localBlocks: 2,
      remoteBlocks: 1,
      numTokens: 16,
    });
    // The remote's list has only its own slice, so its length does not give the start.
    refused(
      attempt({ localBlockIds: [[5]], remoteBlockIds: [[1, 2]] }),
      "KV_BLOCKS_MISMATCH",
      "1 local blocks (DCP 1) and 2 remote ones (DCP 2) the number of blocks before the local ones is ambiguous (tokens: unknown",
    );
  });

  test("a block that no source covers", () => {
    const plan = planOf();
    const half = { ...plan, sources: plan.sources.slice(0, 1) };
    const attempt = () => pairsOf(half, asked([5, 6], [1], 32));
    refused(attempt, "KV_BLOCKS_MISMATCH", "group 0: no remote rank covers local block 6");
  });
});
