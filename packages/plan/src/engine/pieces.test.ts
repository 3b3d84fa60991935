import { describe, expect, test } from "vitest";
import type { ModelGeometry, RankGeometry } from "../geometry/rank-geometry.js";
import { sampleRank } from "../sample-pair.test-support.js";
import { mappingsByHeads } from "./mappings.js";
import { attentionShape, type PairContext, type RegionPair, regionPair } from "./pieces.js";

interface Sides {
  readonly local?: Partial<RankGeometry>;
  readonly remote?: Partial<RankGeometry>;
  readonly model?: Partial<ModelGeometry>;
}

/** The pairs of regions of two ranks of a model with 4 KV heads. */
function pairsOf({ local = {}, remote = {}, model = {} }: Sides) {
  const [mine, theirs] = [sampleRank(local), sampleRank(remote)];
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
