import { KvError } from "@kv/interface";
import { describe, expect, test } from "vitest";
import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { GroupPlan } from "../engine/group-plans.js";
import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import { planRequest } from "../request/request-plan.js";
import { samplePlan, sampleRank } from "../sample-pair.test-support.js";
import { applyReceivePass, uncoveredRuns } from "./apply-receive-pass.js";
import type { ReceivePassGroup } from "./build-receive-pass.js";

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
    /5119 bytes .* need 5120/,
  );
  expect(() => applyReceivePass(plan, receivePass, [])).toThrow(/region 0 .* no view/);
  expect(whole.every((byte) => byte === 1)).toBe(true);
});

test("leaves the padding between blocks unchanged", () => {
  const rank = sampleRank();
  const regions = rank.regions.map((region) => ({ ...region, blockStrideBytes: 600 }));
  const plan = samplePlan({ ...rank, regions }, rank);
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
  readonly tokens?: number;
  readonly ratio?: number;
  readonly region?: Partial<RegionGeometry>;
  readonly local?: Partial<RankGeometry>;
}

/**
 * A plan of one region: two blocks of 2 heads × 6 tokens of 2 bytes, with 4 bytes of padding behind
 * each; three remote blocks in each.
 */
function small({
  heads = 2,
  tokens = 6,
  ratio = 3,
  region = {},
  local = {},
}: Small = {}): EngineTransferPlan {
  const plan = samplePlan();
  const [groupPlan] = plan.groupPlans;
  const blockLengthBytes = heads * tokens * 2;
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
      ...local,
    },
    blockSizeRatio: ratio,
    // Of this region alone: the model's heads are others.
    headsOfRegion: [heads],
    regionsOfGroup: [[0]],
    groupPlans: [{ ...(groupPlan as GroupPlan), partTokens: tokens / ratio, localParts: ratio }],
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

/**
 * The two bytes of each cell: a number with the digits head and token, and that number plus 100.
 */
const cells = (numbers: readonly number[]) => numbers.flatMap((number) => [number, number + 100]);
// As three remote blocks of 2 heads × 2 tokens land: "head token" each.
const LANDED = cells([0, 1, 10, 11, 2, 3, 12, 13, 4, 5, 14, 15]);
const BY_HEAD = cells([0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]);
const BY_TOKEN = cells([0, 10, 1, 11, 2, 12, 3, 13, 4, 14, 5, 15]);
const OTHER = Array.from({ length: 24 }, (_, at) => 200 + at);
const PADDING = [251, 252, 253, 254];

describe("the order of heads and tokens", () => {
  const landed = () => Uint8Array.from([...OTHER, ...PADDING, ...LANDED]);
  test("remote blocks become one head-major block", () => {
    expect(pass(small(), { permuteBlockIds: Int32Array.of(1) }, landed())).toEqual([
      ...OTHER,
      ...PADDING,
      ...BY_HEAD,
    ]);
  });

  test("remote blocks become one token-major block in a token-major cache", () => {
    const plan = small({ local: { layout: "LBNHC" } });
    expect(pass(plan, { permuteBlockIds: Int32Array.of(1) }, landed())).toEqual([
      ...OTHER,
      ...PADDING,
      ...BY_TOKEN,
    ]);
  });

  test("transposes blocks of equal size too", () => {
    const plan = small({ ratio: 1, local: { layout: "LBNHC" } });
    const bytes = Uint8Array.from([...BY_HEAD, ...PADDING, ...BY_HEAD]);
    expect(pass(plan, { permuteBlockIds: Int32Array.of(0, 1) }, bytes)).toEqual([
      ...BY_TOKEN,
      ...PADDING,
      ...BY_TOKEN,
    ]);
  });

  test("leaves cells for several tokens unchanged", () => {
    const plan = small({
      heads: 1,
      tokens: 4,
      ratio: 1,
      region: { blockLengthBytes: 6, blockStrideBytes: 6 },
    });
    const bytes = Uint8Array.of(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12);
    const group = {
      permuteBlockIds: Int32Array.of(0),
      partialBlock: { blockId: 0, fromToken: 2 },
      leadingBlock: { blockId: 0, untilToken: 1 },
      zeroBlockIds: Int32Array.of(1),
    };
    expect(pass(plan, group, bytes)).toEqual([1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0]);
  });
});

describe("zeroes the tokens that no transfer covered", () => {
  const full = () => new Uint8Array(52).fill(7);
  const zerosOf = (bytes: readonly number[]) =>
    bytes.flatMap((byte, at) => (byte === 0 ? [at] : []));
  const from = (begin: number, end: number) =>
    Array.from({ length: end - begin }, (_, at) => begin + at);

  test("from the first uncovered token, in each head", () => {
    const bytes = pass(small(), { partialBlock: { blockId: 1, fromToken: 4 } }, full());
    // Block 1 begins at 28; a head is 12 bytes, four tokens are 8.
    expect(zerosOf(bytes)).toEqual([...from(36, 40), ...from(48, 52)]);
  });

  test("the end of a token-major block", () => {
    const plan = small({ local: { layout: "BLNHC" } });
    const bytes = pass(plan, { partialBlock: { blockId: 0, fromToken: 4 } }, full());
    // A token is 2 heads of 2 bytes.
    expect(zerosOf(bytes)).toEqual(from(16, 24));
  });

  test("the end of an MLA block", () => {
    const plan = small({ heads: 1, ratio: 1 });
    const bytes = pass(
      plan,
      { partialBlock: { blockId: 1, fromToken: 5 } },
      new Uint8Array(28).fill(7),
    );
    expect(zerosOf(bytes)).toEqual(from(26, 28));
  });

  test("the tokens before a window, in head-major and token-major blocks", () => {
    const group = {
      leadingBlock: { blockId: 1, untilToken: 2 },
      partialBlock: { blockId: 1, fromToken: 5 },
    };
    // A head of block 1 is 12 bytes from 28 on: its first two tokens are 4, its last is 2.
    expect(zerosOf(pass(small(), group, full()))).toEqual([
      ...from(28, 32),
      ...from(38, 40),
      ...from(40, 44),
      ...from(50, 52),
    ]);
    const plan = small({ local: { layout: "BLNHC" } });
    const bytes = pass(plan, { leadingBlock: { blockId: 0, untilToken: 2 } }, full());
    expect(zerosOf(bytes)).toEqual(from(0, 8));
  });

  test("whole blocks, without the padding behind them", () => {
    expect(zerosOf(pass(small(), { zeroBlockIds: Int32Array.of(0) }, full()))).toEqual(from(0, 24));
  });

  test("each page of a packed row, without the bytes between pages", () => {
    const packedMembers = {
      "layer.0": { offsetBytes: 0, lengthBytes: 4 },
      other: { offsetBytes: 6, lengthBytes: 8 },
    };
    const row = {
      heads: 1,
      tokens: 4,
      ratio: 1,
      region: { blockLengthBytes: 20, blockStrideBytes: 20 },
    };
    const plan = small({ ...row, local: { packedMembers } });
    const group = { partialBlock: { blockId: 1, fromToken: 3 }, zeroBlockIds: Int32Array.of(0) };
    // Cells of 1 and of 2 bytes: of block 1 their last each.
    expect(zerosOf(pass(plan, group, new Uint8Array(40).fill(7)))).toEqual([
      ...from(0, 4),
      ...from(6, 14),
      23,
      32,
      33,
    ]);
    // A region beside the rows is one of its own.
    const beside = small({ ...row, local: { packedMembers: { other: packedMembers.other } } });
    expect(zerosOf(pass(beside, group, new Uint8Array(40).fill(7)))).toEqual([
      ...from(0, 20),
      ...from(35, 40),
    ]);
  });
});

describe("refuses", () => {
  const refused = (attempt: () => unknown, message: RegExp) => {
    expect(attempt).toThrow(message);
    try {
      attempt();
    } catch (error) {
      expect(KvError.is(error) && error.code).toBe("KV_PLAN_INVALID");
    }
  };

  test("a view that is one byte short; the padding after the last block may be missing", () => {
    expect(pass(small(), {}, new Uint8Array(52))).toHaveLength(52);
    refused(
      () => pass(small(), {}, new Uint8Array(51)),
      /"layer.0": a view of 51 bytes .* 2 blocks need 52/,
    );
  });

  test("a block that does not divide into its heads and tokens", () => {
    const group = { partialBlock: { blockId: 0, fromToken: 1 } };
    const odd = { blockLengthBytes: 23, blockStrideBytes: 28 };
    refused(
      () => pass(small({ region: odd }), group, new Uint8Array(52)),
      /23 bytes .* 2 heads of 6 tokens/,
    );
    refused(
      () => pass(small({ ratio: 1, region: odd }), group, new Uint8Array(52)),
      /2 heads of 6 tokens/,
    );
    refused(
      () => pass(small({ heads: 1, region: odd }), group, new Uint8Array(52)),
      /1 heads of 6 tokens/,
    );
  });

  test("a pass that belongs to another plan", () => {
    const bytes = new Uint8Array(52);
    refused(() => pass(small(), { group: 1 }, bytes), /group 1 .* not in the plan/);
    refused(() => pass({ ...small(), groupPlans: [] }, {}, bytes), /group 0 .* not in the plan/);
    refused(
      () => pass({ ...small(), regionsOfGroup: [] }, {}, bytes),
      /group 0 .* not in the plan/,
    );
    const beyond = { ...small(), regionsOfGroup: [[1]] };
    expect(() => applyReceivePass(beyond, { groups: [nothing] }, [bytes, bytes])).toThrow(
      /region 1 of the plan/,
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
