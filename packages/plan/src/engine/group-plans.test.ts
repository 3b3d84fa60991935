import { KvError } from "@kv/interface";
import { expect, test } from "vitest";
import type { ModelGeometry, RankGeometry } from "../geometry/rank-geometry.js";
import { sampleRank } from "../sample-pair.test-support.js";
import type { BlockParts } from "./attention-pieces.js";
import { type GroupPlan, groupPlans } from "./group-plans.js";
import { mappingsByHeads } from "./region-heads.js";
import type { RegionPiece } from "./segments.js";

interface Given {
  readonly local?: Partial<RankGeometry>;
  readonly remote?: Partial<RankGeometry>;
  readonly parts?: BlockParts;
  readonly tokenByToken?: boolean;
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
    cuts: { parts, tokenByToken: given.tokenByToken ?? false },
  });
}

test("token by token, each group has as many parts as its blocks have tokens", () => {
  const plans = plansOf(["full", "swa"], {
    local: { groupBlockTokens: [16, 32] },
    remote: { kernelBlockSize: 8 },
    parts: { localParts: 2, remoteParts: 1 },
    tokenByToken: true,
  });
  const parts = plans.map(({ localParts, remoteParts, partTokens }) => [
    localParts,
    remoteParts,
    partTokens,
  ]);
  expect(parts).toEqual([
    [16, 8, 1],
    [32, 16, 1],
  ]);
});

test("attention blocks are cut into the given parts on both sides", () => {
  // Local blocks of 48 tokens and remote ones of 32 share parts of 16. A logical block has two
  // kernel blocks here, five there.
  const [plan] = plansOf(["full"], {
    local: { kernelBlockSize: 48, physicalBlocksPerLogical: 2 },
    remote: { kernelBlockSize: 32, physicalBlocksPerLogical: 5 },
    parts: { localParts: 3, remoteParts: 2 },
  });
  expect(plan).toEqual({
    kind: "full",
    extent: "sequence",
    unit: "kernel-block",
    segments: [],
    localBlockTokens: 96,
    remoteBlockTokens: 160,
    partTokens: 16,
    localParts: 3,
    remoteParts: 2,
    localPerLogical: 2,
    remotePerLogical: 5,
  });
});

test("a state moves as whole logical blocks, regardless of the parts of other groups", () => {
  const plans = plansOf(["swa", "mamba"], {
    local: { kernelBlockSize: 32, physicalBlocksPerLogical: 3 },
    remote: { physicalBlocksPerLogical: 4 },
    parts: { localParts: 2, remoteParts: 1 },
  });
  expect(plans[0]).toMatchObject({
    extent: "window",
    unit: "kernel-block",
    localPerLogical: 3,
    remotePerLogical: 4,
  });
  expect(plans[1]).toEqual({
    kind: "mamba",
    extent: "state",
    unit: "logical-block",
    segments: [],
    localBlockTokens: 96,
    remoteBlockTokens: 64,
    partTokens: 16,
    localParts: 1,
    remoteParts: 1,
    localPerLogical: 1,
    remotePerLogical: 1,
  });
});

test("groups may have different numbers of tokens per block", () => {
  const plans = plansOf(["full", "swa"], {
    local: { kernelBlockSize: 32, groupBlockTokens: [32, 64] },
    remote: { groupBlockTokens: [16, 32] },
    parts: { localParts: 2, remoteParts: 1 },
  });
  const tokens = plans.map(({ partTokens, localBlockTokens, remoteBlockTokens }) => [
    partTokens,
    localBlockTokens,
    remoteBlockTokens,
  ]);
  expect(tokens).toEqual([
    [16, 32, 16],
    [32, 64, 32],
  ]);
});

test("tokens per block of a group keep the ratio of the kernel blocks, also when the remote's are larger", () => {
  const given = {
    local: { groupBlockTokens: [8] },
    remote: { kernelBlockSize: 32, groupBlockTokens: [16] },
  };
  expect(plansOf(["full"], { ...given, parts: { localParts: 1, remoteParts: 2 } })).toMatchObject([
    { partTokens: 8, localBlockTokens: 8, remoteBlockTokens: 16 },
  ]);
});

test("each group has exactly the segments that hold it", () => {
  const plans = plansOf(["full", "mamba", "swa"], { pieces: [[0, 2], [1], [2]] });
  expect(plans.map(({ segments }) => segments)).toEqual([[0], [1], [0, 2]]);
});

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

test.each<[string, readonly string[], Given, RegExp]>([
  [
    "scratch with larger local blocks",
    ["full", "circular"],
    { local: { kernelBlockSize: 32 }, parts: TWO_HERE },
    /group 1 \(circular\) hold no tokens.*local 32, remote 16/,
  ],
  [
    "scratch with larger remote blocks",
    ["circular"],
    { remote: { kernelBlockSize: 32 }, parts: TWO_THERE },
    /group 0 \(circular\) hold no tokens.*local 16, remote 32/,
  ],
  [
    "scratch with different numbers of kernel blocks per logical block",
    ["circular"],
    { local: { physicalBlocksPerLogical: 2 } },
    /group 0 \(circular\) is one piece of scratch.*local 2, remote 1/,
  ],
  [
    "a group whose tokens per block have another ratio",
    ["full", "swa"],
    {
      local: { kernelBlockSize: 32, groupBlockTokens: [32, 64] },
      remote: { groupBlockTokens: [16, 16] },
      parts: TWO_HERE,
    },
    /group 1 \(swa\).*ratio.*64 tokens of 32, remote 16 tokens of 16/,
  ],
  [
    "a group whose blocks do not divide into the parts",
    ["full", "swa"],
    { local: { kernelBlockSize: 32, groupBlockTokens: [32, 33] }, parts: TWO_HERE },
    /group 1: kernel blocks of 33 tokens do not divide into the 2 parts/,
  ],
])("refuses %s", (_what, groups, given, message) => {
  expect(() => plansOf(groups, given)).toThrow(message);
  try {
    plansOf(groups, given);
  } catch (error) {
    expect(KvError.is(error) && error.code).toBe("KV_PLAN_UNSUPPORTED");
  }
});
