import { expect, test } from "vitest";
import { buildEngineTransferPlan } from "../engine/engine-plan.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import { sampleRank } from "../sample-pair.test-support.js";
import { provePlan } from "./prove-plan.js";

/**
 * Pages of two layers in one row per block: 512 bytes of attention, then padding into which a state
 * reaches.
 */
function rankOf(base: number): RankGeometry {
  const rank = sampleRank({ layout: "BLHNC" });
  const [pageBytes, rowBytes] = [1024, 2048];
  return {
    ...rank,
    stateSpace: { convProjectionBytes: [256, 128, 128], convBytes: 512, recurrentBytes: 256 },
    regions: rank.regions.map((region, layer) => ({
      ...region,
      baseAddress: base + layer * pageBytes,
      blockStrideBytes: rowBytes,
      groupId: -1,
    })),
  };
}

test("in a packed row, a state after a page's attention belongs to the page's layer", () => {
  const [local, remote] = [rankOf(2 ** 30), rankOf(2 ** 31)];
  const plan = buildEngineTransferPlan({
    local,
    remotes: [remote],
    numKvHeads: 4,
    groups: ["full", "mamba"],
  });
  expect(provePlan(plan, { remotes: [remote], numKvHeads: 4 })).toMatchObject({ proven: true });
});
