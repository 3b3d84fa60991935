import { expect, test } from "vitest";
import type { ModelGeometry, RankGeometry } from "../geometry/rank-geometry.js";
import { refused } from "../refused.test-support.js";
import { sampleRank } from "../sample-pair.test-support.js";
import { type GroupPlan, groupPlans } from "./group-plans.js";
import { mappingsByHeads } from "./mappings.js";
import type { BlockParts, RegionPiece } from "./pieces.js";

interface Given {
  readonly local?: Partial<RankGeometry>;
  readonly remote?: Partial<RankGeometry>;
  readonly parts?: BlockParts;
  readonly model?: Partial<ModelGeometry>;
  /** Groups of each piece. */
  readonly pieces?: readonly (readonly number[])[];
  /** Of the region of each piece; default 4. */
  readonly heads?: readonly number[];
}

function plansOf(groups: readonly string[], given: Given = {}): readonly GroupPlan[] {
  const [local, remote] = [sampleRank(given.local), sampleRank(given.remote)];
  const model = { numKvHeads: 4, groups, ...given.model };
  const { parts = { localParts: 1, remoteParts: 1 } } = given;
  return groupPlans({
    context: { local, remote, model, mapping: mappingsByHeads(local, remote, model) },
    // groupPlans reads only the groups, the region and the region's heads of a piece.
    pieces: (given.pieces ?? []).map((own, index) => {
      const pair = {
        region: local.regions[0],
        heads: given.heads?.[index] ?? 4,
      } as RegionPiece["pair"];
      return { ...({} as RegionPiece), pair, groups: own };
    }),
    parts,
    cuts: { parts, tokenByToken: false },
  });
}

test("a group that shares a region with more heads reports its own number of heads", () => {
  const of = { model: { groupKvHeads: [4, 2, 4, 2] }, local: { tpSize: 2 } };
  const plans = plansOf(["full", "swa", "swa", "swa"], {
    ...of,
    pieces: [[0, 1], [2], [3]],
    heads: [4, 4, 2],
  });
  expect(plans.map(({ sharedHeads }) => sharedHeads)).toEqual([undefined, 1, undefined, undefined]);
  expect(plans.map((plan) => "sharedHeads" in plan)).toEqual([false, true, false, false]);
});

const TWO_HERE = { localParts: 2, remoteParts: 1 };
const TWO_THERE = { localParts: 1, remoteParts: 2 };

test("scratch moves when both sides have the same blocks", () => {
  const two = { physicalBlocksPerLogical: 2 };
  expect(plansOf(["circular"], { local: two, remote: two })).toMatchObject([
    { extent: "whole", localPerLogical: 2 },
  ]);
});

test("a state's tokens per block may have another ratio than the kernel blocks", () => {
  const given = { local: { groupBlockTokens: [32] }, remote: { groupBlockTokens: [16] } };
  expect(plansOf(["mamba"], given)).toMatchObject([{ partTokens: 32 }]);
});

test.each<[string, readonly string[], Given, string]>([
  [
    "scratch with larger local blocks",
    ["full", "circular"],
    { local: { kernelBlockSize: 32 }, parts: TWO_HERE },
    "group 1 (circular) hold no tokens, so they cannot be cut: local 32, remote 16",
  ],
  [
    "scratch with larger remote blocks",
    ["circular"],
    { remote: { kernelBlockSize: 32 }, parts: TWO_THERE },
    "group 0 (circular) hold no tokens, so they cannot be cut: local 16, remote 32",
  ],
  [
    "scratch with different numbers of kernel blocks per logical block",
    ["circular"],
    { local: { physicalBlocksPerLogical: 2 } },
    "group 0 (circular) is one piece of scratch, and has different numbers of kernel blocks: local 2, remote 1",
  ],
  [
    "a group whose tokens per block have another ratio",
    ["full", "swa"],
    {
      local: { kernelBlockSize: 32, groupBlockTokens: [32, 64] },
      remote: { groupBlockTokens: [16, 16] },
      parts: TWO_HERE,
    },
    "group 1 (swa): kernel blocks do not hold tokens in the ratio of the engine's kernel blocks: local 64 tokens of 32, remote 16 tokens of 16",
  ],
  [
    "a group whose blocks do not divide into the parts",
    ["full", "swa"],
    { local: { kernelBlockSize: 32, groupBlockTokens: [32, 33] }, parts: TWO_HERE },
    "group 1: kernel blocks of 33 tokens do not divide into the 2 parts",
  ],
])("refuses %s", (_what, groups, given, message) => {
  refused(() => plansOf(groups, given), "KV_PLAN_UNSUPPORTED", message);
});
