import type { KvErrorCode } from "@kv/interface";
import { describe, expect, test } from "vitest";
import type { RankGeometry, StateSpaceGeometry } from "../geometry/rank-geometry.js";
import { refused } from "../refused.test-support.js";
import { sampleRank, withRegions } from "../sample-pair.test-support.js";
import { mamba, requireStatesFit } from "./mamba.js";

/** Projections of 8, 4 and 4 bytes and a recurrent state of 32, divided by `share`. */
function states(share: number, change: Partial<StateSpaceGeometry> = {}): StateSpaceGeometry {
  return {
    convProjectionBytes: [8 / share, 4 / share, 4 / share],
    convBytes: 16 / share,
    recurrentBytes: 32 / share,
    ...change,
  };
}
const rank = (
  tpSize: number,
  tpRank: number,
  stateSpace: StateSpaceGeometry | undefined,
): RankGeometry => {
  const made = sampleRank({ tpSize, tpRank });
  return stateSpace === undefined ? made : { ...made, stateSpace };
};

const piecesOf = (local: RankGeometry, remote: RankGeometry) => {
  const [region, remoteRegion] = [local.regions[0], remote.regions[0]];
  if (region !== undefined && remoteRegion !== undefined)
    mamba.pieces?.({ local, remote, region, remoteRegion });
};

describe("refuses", () => {
  const sound = rank(1, 0, states(1));
  test.each<[string, RankGeometry, RankGeometry, KvErrorCode, string]>([
    [
      "a local rank without state sizes",
      rank(1, 0, undefined),
      sound,
      "KV_PLAN_INVALID",
      "the local rank has a state-space group",
    ],
    [
      "a remote rank without state sizes",
      sound,
      rank(2, 1, undefined),
      "KV_PLAN_INVALID",
      "remote rank 1 has a state-space group",
    ],
    [
      "projections that do not add up",
      rank(1, 0, states(1, { convProjectionBytes: [8, 4, 5] })),
      sound,
      "KV_PLAN_INVALID",
      "the local rank: projections of 8 + 4 + 5 bytes do not add up to a convolution state of 16",
    ],
    [
      "different convolution state sizes",
      sound,
      rank(1, 0, { convBytes: 17, recurrentBytes: 32 }),
      "KV_PLAN_INCOMPATIBLE",
      "convolution states do not have the sizes that TP sizes in the ratio 1 imply: local 16, remote 17",
    ],
    [
      "different recurrent state sizes",
      sound,
      rank(1, 0, states(1, { recurrentBytes: 33 })),
      "KV_PLAN_INCOMPATIBLE",
      "recurrent states do not have the sizes that TP sizes in the ratio 1 imply: local 32, remote 33",
    ],
    [
      "states that are not split over more remote ranks",
      sound,
      rank(2, 0, states(1)),
      "KV_PLAN_INCOMPATIBLE",
      "convolution states do not have the sizes that TP sizes in the ratio 2 imply: local 16, remote 16",
    ],
    [
      "states that are not split over more local ranks",
      rank(2, 0, states(1)),
      sound,
      "KV_PLAN_INCOMPATIBLE",
      "convolution states do not have the sizes that TP sizes in the ratio 1/2 imply: local 16, remote 16",
    ],
    [
      "a projection that does not divide",
      rank(1, 0, states(1, { convProjectionBytes: [9, 4, 3] })),
      rank(2, 0, states(2)),
      "KV_PLAN_INVALID",
      "9 bytes of state do not divide among 2 remote ranks",
    ],
  ])("%s", (_what, local, remote, code, message) => {
    refused(() => piecesOf(local, remote), code, message);
  });
});

describe("size of a state in a logical block", () => {
  // Kernel blocks of 512 bytes, 600 from one to the next.
  const paged = (recurrentBytes: number): RankGeometry => {
    const made = sampleRank({
      physicalBlocksPerLogical: 2,
      stateSpace: { convBytes: 100, recurrentBytes },
    });
    return withRegions(made, () => ({ blockStrideBytes: 600 }));
  };

  test("accepts a state up to the kernel blocks with padding, refuses a larger one", () => {
    expect(() => requireStatesFit("P", paged(1100), [0, 1])).not.toThrow();
    refused(
      () => requireStatesFit("P", paged(1101), [1]),
      "KV_PLAN_INVALID",
      'P, region "layer.1": a state of 100 + 1101 bytes is larger than a logical block\'s 1200',
    );
  });

  test("checks only the given regions that exist", () => {
    expect(() => requireStatesFit("P", paged(1101), [])).not.toThrow();
    expect(() => requireStatesFit("P", paged(1101), [2])).not.toThrow();
  });

  test("accepts a rank without states", () => {
    expect(() => requireStatesFit("P", sampleRank(), [0])).not.toThrow();
  });
});
