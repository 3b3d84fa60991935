import { describe, expect, test } from "vitest";
import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { GroupPlan } from "../engine/group-plans.js";
import type { RegionGeometry } from "../geometry/rank-geometry.js";
import { refused } from "../refused.test-support.js";
import { planRequest } from "../request/request-plan.js";
import { samplePlan, sampleRank, withRegions } from "../sample-pair.test-support.js";
import type { ReceivePassGroup } from "./receive-pass.js";
import { applyReceivePass, uncoveredRuns } from "./receive-pass.js";

test("refuses short or missing views before it writes a byte", () => {
  const plan = samplePlan();
  const { receivePass } = planRequest(plan, {
    localBlockIds: [[1]],
    remoteBlockIds: [[1]],
    numTokens: 3,
  });
  if (receivePass === undefined) throw new Error("a pass was expected");
  const whole = new Uint8Array(10 * 512).fill(1);
  expect(() => applyReceivePass(plan, receivePass, [whole.subarray(1), whole])).toThrow(
    "5119 bytes is too short: 10 blocks need 5120",
  );
  expect(() => applyReceivePass(plan, receivePass, [])).toThrow("region 0 of the plan: no view");
  expect(whole.every((byte) => byte === 1)).toBe(true);
});

test("leaves the padding between blocks unchanged", () => {
  const rank = sampleRank();
  const padded = withRegions(rank, () => ({ blockStrideBytes: 600 }));
  const plan = samplePlan(padded, rank);
  const { receivePass } = planRequest(plan, {
    localBlockIds: [[1]],
    remoteBlockIds: [[1]],
    numTokens: 8,
  });
  const views = [0, 1].map(() => new Uint8Array(6000).fill(1));
  if (receivePass !== undefined) applyReceivePass(plan, receivePass, views);
  const zeros = [...(views[0] ?? [])].flatMap((byte, at) => (byte === 0 ? [at] : []));
  // Four heads of 128 bytes in block 1; the later half of each is zeroed.
  const expected = [0, 1, 2, 3].flatMap((head) =>
    Array.from({ length: 64 }, (_, at) => 600 + head * 128 + 64 + at),
  );
  expect(zeros).toEqual(expected);
  if (receivePass === undefined) return;
  const runs = [...(uncoveredRuns(plan, receivePass).get(0) ?? [])];
  expect(runs).toEqual([0, 1, 2, 3].flatMap((head) => [600 + head * 128 + 64, 64]));
});

interface Small {
  readonly heads?: number;
  readonly ratio?: number;
  readonly region?: Partial<RegionGeometry>;
}

/**
 * A plan of one region: two blocks of 2 heads × 6 tokens of 2 bytes, with 4 bytes of padding behind
 * each; three remote blocks in each.
 */
function small({ heads = 2, ratio = 3, region = {} }: Small = {}): EngineTransferPlan {
  const plan = samplePlan();
  const [groupPlan] = plan.groupPlans;
  const blockLengthBytes = heads * 6 * 2;
  return {
    ...plan,
    local: {
      ...plan.local,
      regions: [
        {
          name: "layer.0",
          baseAddress: 0,
          groupId: 0,
          memoryType: "DRAM",
          numBlocks: 2,
          blockLengthBytes,
          blockStrideBytes: blockLengthBytes + 4,
          ...region,
        },
      ],
    },
    blockSizeRatio: ratio,
    // Of this region alone: the model's heads are others.
    headsOfRegion: [heads],
    regionsOfGroup: [[0]],
    groupPlans: [{ ...(groupPlan as GroupPlan), partTokens: 6 / ratio, localParts: ratio }],
  };
}

const NONE = new Int32Array(0);
const nothing: ReceivePassGroup = { group: 0, permuteBlockIds: NONE, zeroBlockIds: NONE };

/** Runs the pass over `bytes` and returns all bytes. */
function pass(
  plan: EngineTransferPlan,
  group: Partial<ReceivePassGroup>,
  bytes: Uint8Array,
): number[] {
  applyReceivePass(plan, { groups: [{ ...nothing, ...group }] }, [bytes]);
  return [...bytes];
}

describe("refuses", () => {
  const invalid = (attempt: () => unknown, message: string) =>
    refused(attempt, "KV_PLAN_INVALID", message);

  test("a view that is one byte short; the padding after the last block may be missing", () => {
    expect(pass(small(), {}, new Uint8Array(52))).toHaveLength(52);
    invalid(
      () => pass(small(), {}, new Uint8Array(51)),
      '"layer.0": a view of 51 bytes is too short: 2 blocks need 52',
    );
  });

  test("a block that does not divide into its heads and tokens", () => {
    const group = { partialBlock: { blockId: 0, fromToken: 1 } };
    const odd = { blockLengthBytes: 23, blockStrideBytes: 28 };
    invalid(
      () => pass(small({ region: odd }), group, new Uint8Array(52)),
      "23 bytes does not divide into 2 heads of 6 tokens",
    );
    invalid(
      () => pass(small({ ratio: 1, region: odd }), group, new Uint8Array(52)),
      "2 heads of 6 tokens",
    );
    invalid(
      () => pass(small({ heads: 1, region: odd }), group, new Uint8Array(52)),
      "1 heads of 6 tokens",
    );
  });

  test("a pass that belongs to another plan", () => {
    const bytes = new Uint8Array(52);
    invalid(
      () => pass(small(), { group: 1 }, bytes),
      "group 1 of the receive pass is not in the plan",
    );
    invalid(
      () => pass({ ...small(), groupPlans: [] }, {}, bytes),
      "group 0 of the receive pass is not in the plan",
    );
    invalid(
      () => pass({ ...small(), regionsOfGroup: [] }, {}, bytes),
      "group 0 of the receive pass is not in the plan",
    );
    const beyond = { ...small(), regionsOfGroup: [[1]] };
    expect(() => applyReceivePass(beyond, { groups: [nothing] }, [bytes, bytes])).toThrow(
      "region 1 of the plan",
    );
  });
});

describe("zeroing for a group with fewer heads than another group of the region", () => {
  const [BLOCK, WHOLE] = [24, 52];
  /**
   * Places of block 0 that are zeroed from token 4 of 6 on: two heads of 12 bytes, or one of 24.
   */
  const zeroed = (region: Partial<RegionGeometry>) => {
    const plan = small({ ratio: 1, region });
    const [groupPlan] = plan.groupPlans as [GroupPlan];
    const shared = { ...plan, groupPlans: [{ ...groupPlan, sharedHeads: 1 }] };
    const bytes = pass(
      shared,
      { partialBlock: { blockId: 0, fromToken: 4 } },
      new Uint8Array(WHOLE).fill(1),
    );
    return bytes.slice(0, BLOCK).flatMap((byte, at) => (byte === 0 ? [at] : []));
  };
  const ofOne = [16, 17, 18, 19, 20, 21, 22, 23];
  const ofTwo = [8, 9, 10, 11, 20, 21, 22, 23];

  test.each<[string, Partial<RegionGeometry>, readonly number[]]>([
    ["uses the group's heads", {}, ofOne],
    ["uses the group's heads for a region that is not replicated", { replicated: false }, ofOne],
    ["uses the region's own numKvHeads", { numKvHeads: 2 }, ofTwo],
    ["uses the region's heads for a replicated region", { replicated: true }, ofTwo],
  ])("%s", (_what, region, expected) => {
    expect(zeroed(region)).toEqual(expected);
  });
});
