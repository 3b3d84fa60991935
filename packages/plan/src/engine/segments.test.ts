import { describe, expect, test } from "vitest";
import type { ModelGeometry, RankGeometry } from "../geometry/rank-geometry.js";
import { sampleRank } from "../sample-pair.test-support.js";
import { mappingsByHeads } from "./region-heads.js";
import {
  attentionShape,
  type PairContext,
  piecesOf,
  type RegionPair,
  regionPair,
} from "./segments.js";

const COPY = {
  form: "copy",
  parts: { localParts: 1, remoteParts: 1 },
  tokenByToken: false,
} as const;

interface Sides {
  readonly local?: Partial<RankGeometry>;
  readonly remote?: Partial<RankGeometry>;
  readonly model?: Partial<ModelGeometry>;
  /** By region: the group of its blocks. */
  readonly groupIds?: readonly number[];
}

/** The pairs of regions of two ranks of a model with 4 KV heads. */
function pairsOf({ local = {}, remote = {}, model = {}, groupIds = [0, 0] }: Sides = {}) {
  const rank = (change: Partial<RankGeometry>) => {
    const made = sampleRank(change);
    return {
      ...made,
      regions: made.regions.map((one, index) => ({ ...one, groupId: groupIds[index] ?? 0 })),
    };
  };
  const [mine, theirs] = [rank(local), rank(remote)];
  const whole: ModelGeometry = { numKvHeads: 4, groups: ["full"], ...model };
  const context: PairContext = {
    local: mine,
    remote: theirs,
    model: whole,
    mapping: mappingsByHeads(mine, theirs, whole),
  };
  const pairs = mine.regions.map((region, index) =>
    regionPair(context, index, region, theirs.regions[index] as typeof region),
  ) as [RegionPair, RegionPair];
  return { context, pairs };
}

const STATE = { convBytes: 96, recurrentBytes: 64 };
const source = (tpRank: number, stateIndex = 0) => ({ tpRank, stateIndex });

describe("contents of a region", () => {
  test("lists attention groups, state groups and the number of heads", () => {
    const model = { groups: ["mamba", "full", "swa", "mamba"] };
    const { pairs } = pairsOf({ model });
    expect(pairs[1]).toMatchObject({
      index: 1,
      attentionGroups: [1, 2],
      stateGroups: [0, 3],
      heads: 4,
    });
    expect(pairs[1].mapping.attentionRanks).toEqual([0]);
  });

  test("latents have no heads", () => {
    expect(pairsOf({ model: { groups: ["mla"] } }).pairs[0].heads).toBeUndefined();
  });
});

describe("shared heads", () => {
  const shapeOf = (sides: Sides, region: 0 | 1 = 0) => {
    const { context, pairs } = pairsOf(sides);
    return attentionShape(context, pairs[region]);
  };

  test("equal ranks share all heads", () => {
    const shape = shapeOf({ remote: { layout: "LBNHC", kernelBlockSize: 8 } });
    // 4 heads × 16 tokens × 8 bytes here, 8 tokens there.
    expect(shape.local).toEqual({ blockBytes: 512, heads: 4, tokens: 16, order: "head-major" });
    expect(shape.remote).toEqual({ blockBytes: 256, heads: 4, tokens: 8, order: "token-major" });
    expect([shape.sharedHeads, shape.remoteHead, shape.localHead(source(0))]).toEqual([4, 0, 0]);
  });

  test("each of several sources fills its own heads", () => {
    const shape = shapeOf({ remote: { tpSize: 2 } });
    expect([shape.local.heads, shape.remote.heads, shape.sharedHeads]).toEqual([4, 2, 2]);
    expect([0, 1].map((rank) => shape.localHead(source(rank)))).toEqual([0, 2]);
  });

  test("a rank's share of the source's heads starts after the lower ranks' shares", () => {
    const shape = shapeOf({ local: { tpSize: 2, tpRank: 1 } });
    expect([shape.local.heads, shape.remote.heads, shape.sharedHeads]).toEqual([2, 4, 2]);
    expect([shape.remoteHead, shape.localHead(source(0))]).toEqual([2, 0]);
  });

  test("all copies of a head fill the same place", () => {
    // Two heads on eight ranks: ranks 0 to 3 hold the first, 4 to 7 the second.
    const shape = shapeOf({ remote: { tpSize: 8 }, model: { numKvHeads: 2 } });
    expect(shape.sharedHeads).toBe(1);
    expect([0, 3, 4, 7].map((rank) => shape.localHead(source(rank)))).toEqual([0, 0, 1, 1]);
  });

  test("a latent is one head at the same place for every source", () => {
    const dealt = { tpSize: 2, dcpSize: 2, blockLengthBytes: 1024 };
    const shape = shapeOf({ remote: dealt, model: { groups: ["mla"] } });
    expect([shape.local.heads, shape.remote.heads, shape.sharedHeads, shape.remoteHead]).toEqual([
      1, 1, 1, 0,
    ]);
    expect([0, 1].map((rank) => shape.localHead(source(rank)))).toEqual([0, 0]);
  });

  test("tokens are those of the region's own group", () => {
    const sides = {
      local: { groupBlockTokens: [16, 32] },
      remote: { kernelBlockSize: 8, groupBlockTokens: [8, 16] },
      model: { groups: ["full", "swa"] },
      groupIds: [0, 1],
    };
    const tokens = ([0, 1] as const).map((region) => {
      const { local, remote } = shapeOf(sides, region);
      return [local.tokens, remote.tokens];
    });
    expect(tokens).toEqual([
      [16, 8],
      [32, 16],
    ]);
  });
});

describe("order inside a block", () => {
  const localOf = (sides: Sides) => {
    const { context, pairs } = pairsOf(sides);
    return attentionShape(context, pairs[0]);
  };

  test("is mixed when groups with different tokens per block share the region", () => {
    const groups = { model: { groups: ["full", "swa"] } };
    expect(localOf({ ...groups, local: { groupBlockTokens: [16, 32] } }).isMixed).toBe(true);
    expect(localOf({ ...groups, local: { groupBlockTokens: [32, 32] } }).isMixed).toBeUndefined();
  });

  test("is mixed when groups with different heads share the region, unless both sides are token-major", () => {
    const model = { numKvHeads: 4, groups: ["full", "swa"], groupKvHeads: [2, 4] };
    const [byHead, byToken] = [{ layout: "LBHNC" }, { layout: "LBNHC" }] as const;
    const mixed = (local: typeof byHead | typeof byToken, remote: typeof local) =>
      localOf({ model, local, remote }).isMixed;
    expect(mixed(byToken, byToken)).toBeUndefined();
    for (const [local, remote] of [
      [byHead, byHead],
      [byHead, byToken],
      [byToken, byHead],
    ] as const) {
      expect(mixed(local, remote)).toBe(true);
    }
    expect(localOf({ model: { ...model, groupKvHeads: [4, 4] } }).isMixed).toBeUndefined();
  });

  test("is known for one head in every layout, and unknown for several spread heads", () => {
    const orders = (layout: "LHBNC" | "LBNHC") =>
      [1, 4].map(
        (tpSize) => localOf({ local: { tpSize, layout }, remote: { tpSize } }).local.order,
      );
    expect(orders("LHBNC")).toEqual(["opaque", "head-major"]);
    expect(orders("LBNHC")).toEqual(["token-major", "token-major"]);
  });
});

describe("pieces", () => {
  /** Region, name, groups and ranks of each piece. */
  const piecesIn = (sides: Sides, choice: Parameters<typeof piecesOf>[3] = COPY) => {
    const { context, pairs } = pairsOf(sides);
    const shapes = pairs.map((pair) =>
      pair.attentionGroups.length === 0 ? undefined : attentionShape(context, pair),
    );
    return piecesOf(context, pairs, shapes, choice).map(({ pair, piece, groups, ranks }) => [
      pair.index,
      piece.name,
      groups,
      ranks,
    ]);
  };

  test("a copied region is one piece for all its groups", () => {
    expect(piecesIn({ remote: { tpSize: 2 }, model: { groups: ["full", "swa"] } })).toEqual([
      [0, "", [0, 1], [0, 1]],
      [1, "", [0, 1], [0, 1]],
    ]);
  });

  test("the direct form has one piece per head", () => {
    const direct = { ...COPY, form: "direct", parts: { localParts: 1, remoteParts: 2 } } as const;
    const remote = { tpSize: 2, kernelBlockSize: 32 };
    expect(piecesIn({ remote }, direct)).toEqual([
      [0, "head 0", [0], [0, 1]],
      [0, "head 1", [0], [0, 1]],
      [1, "head 0", [0], [0, 1]],
      [1, "head 1", [0], [0, 1]],
    ]);
  });

  test("the permute form moves whole blocks", () => {
    const permute = { ...COPY, form: "permute", parts: { localParts: 2, remoteParts: 1 } } as const;
    expect(piecesIn({ local: { kernelBlockSize: 32 } }, permute)).toEqual([
      [0, "", [0], [0]],
      [1, "", [0], [0]],
    ]);
  });

  test("state pieces come after all attention pieces, and a region of only states has no attention piece", () => {
    const sides = {
      local: { stateSpace: STATE },
      remote: { tpSize: 2, stateSpace: { convBytes: 48, recurrentBytes: 32 } },
      // Both remote ranks have a copy of the one head; rank 0 is read. States are split over both.
      model: { numKvHeads: 1, groups: ["full", "mamba", "mamba"] },
    };
    expect(piecesIn(sides)).toEqual([
      [0, "", [0], [0]],
      [1, "", [0], [0]],
      [0, "conv 0", [1, 2], [0, 1]],
      [0, "state", [1, 2], [0, 1]],
      [1, "conv 0", [1, 2], [0, 1]],
      [1, "state", [1, 2], [0, 1]],
    ]);
    expect(piecesIn({ ...sides, groupIds: [0, 2] })).toEqual([
      [0, "", [0], [0]],
      [1, "conv 0", [2], [0, 1]],
      [1, "state", [2], [0, 1]],
    ]);
  });
});
