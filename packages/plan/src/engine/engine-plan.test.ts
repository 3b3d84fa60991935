import type { KvErrorCode } from "@kv/interface";
import { describe, expect, test } from "vitest";
import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import { refusal, refused } from "../refused.test-support.js";
import { planRequest } from "../request/request-plan.js";
import {
  ownGroups,
  samplePair,
  samplePlan,
  sampleRank,
  withRegions,
} from "../sample-pair.test-support.js";
import { buildEngineTransferPlan } from "./engine-plan.js";

/** A rank of an MLA cache that is sharded over DCP groups. */
const dealt = (tpSize: number, dcpSize: number) =>
  sampleRank({ tpSize, dcpSize, blockLengthBytes: 1024 });
const remotesOf = (tpSize: number) =>
  Array.from({ length: tpSize }, (_, tpRank) => sampleRank({ tpRank, tpSize }));
/** Attention in the first region, states in the second. */
const hybrid = ownGroups(sampleRank({ stateSpace: { convBytes: 32, recurrentBytes: 64 } }));
/** A rank whose second region has these changes. */
const region = (change: Partial<RegionGeometry>) =>
  withRegions(sampleRank(), (_, index) => (index === 1 ? change : {}));

test.each<[string, () => unknown, KvErrorCode, string]>([
  [
    "heads that cannot be split",
    () => samplePlan({ tpSize: 3 }, { tpSize: 3 }, { numKvHeads: 4 }),
    "KV_TOPOLOGY_INVALID",
    "4 KV heads cannot be split over TP size 3",
  ],
  [
    "local kernel blocks that do not divide into logical blocks",
    () => samplePlan({ physicalBlocksPerLogical: 3 }),
    "KV_PLAN_INVALID",
    'local rank, region 0 "layer.0": 10 kernel blocks do not divide into logical blocks of 3 kernel blocks',
  ],
  [
    "remote kernel blocks that do not divide into logical blocks",
    () => samplePlan({}, { physicalBlocksPerLogical: 3 }),
    "KV_PLAN_INVALID",
    'remote rank 0, region 0 "layer.0": 10 kernel blocks do not divide into logical blocks of 3 kernel blocks',
  ],
  [
    "another attention backend",
    () => samplePlan({}, { attentionBackend: "CPU_ATTN" }),
    "KV_PLAN_INCOMPATIBLE",
    "local FLASH_ATTN, remote CPU_ATTN",
  ],
  [
    "a layout that spreads heads over memory",
    () => samplePlan({ layout: "BHLNC" }),
    "KV_PLAN_INCOMPATIBLE",
    "local BHLNC, remote LBHNC",
  ],
  [
    "local token-major blocks on a backend with its own token order",
    () =>
      samplePlan(
        { layout: "LBNHC", attentionBackend: "CPU_ATTN" },
        { attentionBackend: "CPU_ATTN" },
      ),
    "KV_PLAN_INCOMPATIBLE",
    "an order of tokens of its own: local LBNHC, remote LBHNC",
  ],
  [
    "a receive pass when the remote blocks are larger than the local ones",
    () => samplePlan({}, { kernelBlockSize: 32 }, { form: "permute" }),
    "KV_PLAN_UNSUPPORTED",
    "not parts of the local ones",
  ],
  [
    "DCP of dense attention",
    () => samplePlan({ dcpSize: 2 }),
    "KV_PLAN_UNSUPPORTED",
    "only MLA caches can be sharded by DCP: local 2, remote 1",
  ],
  [
    "token-major blocks of CPU_ATTN, which vLLM does not have",
    () =>
      samplePlan(
        { layout: "LBNHC", attentionBackend: "CPU_ATTN" },
        {},
        { conversions: ["hnd-to-nhd", "attention-order"] },
      ),
    "KV_PLAN_UNSUPPORTED",
    "a pass cannot, for the order of tokens within a head is the backend's own; finer descriptors cannot",
  ],
  [
    "DCP of a draft that is split by head",
    () => samplePlan(dealt(2, 2), dealt(2, 2), { groups: ["mla", "full"] }),
    "KV_PLAN_UNSUPPORTED",
    "group 1 (full) cannot be sharded over the ranks of a DCP group: local 2, remote 2",
  ],
  [
    "DCP groups that do not divide the engine",
    () => samplePlan(dealt(4, 3), dealt(4, 3), { groups: ["mla"] }),
    "KV_PLAN_INVALID",
    "DCP groups of 3 ranks do not divide TP size 4",
  ],
  [
    "DCP with different block sizes",
    () =>
      samplePlan(dealt(2, 2), { ...dealt(2, 2), physicalBlocksPerLogical: 2 }, { groups: ["mla"] }),
    "KV_PLAN_UNSUPPORTED",
    "must hold equally many tokens on both sides: local 16, remote 32",
  ],
  [
    "more descriptors than an index can hold",
    () => {
      const many = (rank: RankGeometry) =>
        withRegions(rank, (_, index) => ({ baseAddress: index * 2 ** 45, numBlocks: 2 ** 28 }));
      return samplePlan(many(sampleRank({ layout: "LBNHC" })), many(sampleRank()));
    },
    "KV_PLAN_UNSUPPORTED",
    "rank 0: 4294967296 descriptors in one list",
  ],
  [
    "another name of a region",
    () => samplePlan({}, region({ name: "layer.7" })),
    "KV_PLAN_INCOMPATIBLE",
    "region 1 must name the same cache on both sides: local layer.1, remote layer.7",
  ],
  [
    "block lengths that do not match",
    () => samplePlan({}, region({ blockLengthBytes: 511 })),
    "KV_PLAN_INCOMPATIBLE",
    '"layer.1": block lengths do not fit 4 local and 4 remote heads at 1 and 1 equal parts of a block: local 512, remote 511',
  ],
  [
    "hybrid page lengths that do not match",
    () => {
      const stateSpace = { convBytes: 64, recurrentBytes: 64 };
      const rank = (blockLengthBytes: number) => sampleRank({ stateSpace, blockLengthBytes });
      return samplePlan(rank(512), rank(256), { groups: ["full", "mamba"] });
    },
    "KV_PLAN_INCOMPATIBLE",
    '"layer.0": blocks do not have as many bytes for each head and part: local 128 of 512, remote 64 of 256',
  ],
  [
    "overlapping blocks",
    () => samplePlan({}, region({ blockStrideBytes: 10 })),
    "KV_PLAN_INVALID",
    'remote rank 0, region 1 "layer.1": blocks of 512 bytes overlap at a stride of 10',
  ],
  [
    "two regions of one name",
    () => samplePlan(region({ name: "layer.0" })),
    "KV_PLAN_INVALID",
    'the local rank: two regions are named "layer.0"',
  ],
  [
    "an address above 2^53",
    () => samplePlan({}, region({ baseAddress: 2 ** 53 - 512 })),
    "KV_PLAN_INVALID",
    "2^53",
  ],
  [
    "a group that the model lacks",
    () => samplePlan({}, region({ groupId: 1 })),
    "KV_PLAN_INVALID",
    "groupId 1, but the model has 1",
  ],
  [
    "a block that does not divide into its heads and tokens",
    () => samplePlan({ blockLengthBytes: 500 }, { blockLengthBytes: 500 }),
    "KV_PLAN_INVALID",
    "500 bytes does not divide into 4 heads of 16 tokens",
  ],
  [
    "a region in different groups",
    () => samplePlan({}, region({ groupId: 1 }), { groups: ["full", "swa"] }),
    "KV_PLAN_UNSUPPORTED",
    "local 0, remote 1",
  ],
  [
    "DCP sizes that do not divide",
    () => samplePlan({ dcpSize: 2 }, { dcpSize: 3 }),
    "KV_PLAN_INCOMPATIBLE",
    "local 2, remote 3",
  ],
  [
    "a remote rank that the local rank does not read",
    () => samplePlan({ tpSize: 2 }, { tpSize: 2, tpRank: 1 }),
    "KV_PLAN_INCOMPATIBLE",
    "remote rank 1",
  ],
  [
    "a missing remote rank",
    () => samplePlan({}, { tpSize: 2 }),
    "KV_PLAN_INVALID",
    "reads from remote ranks 0, 1; the geometry of 1 is missing",
  ],
  [
    "ranks of one engine that differ",
    () =>
      samplePlan(
        {},
        {},
        {
          remotes: [
            sampleRank({ tpSize: 2 }),
            sampleRank({ tpSize: 2, tpRank: 1, kernelBlockSize: 8 }),
          ],
        },
      ),
    "KV_PLAN_INVALID",
    "differ in kernelBlockSize: 16 and 8",
  ],
  [
    "no remote rank at all",
    () => samplePlan({}, {}, { remotes: [] }),
    "KV_PLAN_INVALID",
    "at least one remote rank",
  ],
])("refuses %s, with both values", (_what, attempt, code, message) => {
  refused(attempt, code, message);
});

test("chooses the transfer form and gives the reason", () => {
  const plan = (local: object, remote: object, options: object = {}) =>
    samplePlan(local, remote, { ...options });
  const big = { kernelBlockSize: 32 };
  expect(plan({}, {}).form).toBe("copy");
  expect(plan(big, {})).toMatchObject({ form: "permute", blockSizeRatio: 2 });
  expect(plan(big, {}).formReason).toMatch(
    /descriptors of a block: \d+ and a pass, or \d+ that land in place/,
  );
  // One head: parts lie in order.
  expect(plan({ ...big, tpSize: 4 }, { tpSize: 4 }).form).toBe("copy");
  expect(plan(big, {}, { canPass: false })).toMatchObject({ form: "direct" });
  expect(plan(big, {}, { canPass: false }).formReason).toContain("device memory");
  expect(plan({}, big)).toMatchObject({ form: "direct", blockSizeRatio: 1, remoteParts: 2 });
  expect(plan({ kernelBlockSize: 48 }, big)).toMatchObject({ blockSizeRatio: 3, remoteParts: 2 });
  expect(plan({ layout: "LBNHC" }, {})).toMatchObject({
    form: "direct",
    blockSizeRatio: 16,
    remoteParts: 16,
  });
  expect(plan({ layout: "LBNHC" }, {}, { conversions: ["hnd-to-nhd"] }).form).toBe("permute");
});

test.each(["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"] as const)(
  "layout %s: copies whole blocks between equal ranks",
  (layout) => {
    const plan = samplePlan({ layout }, { layout });
    expect(plan.form).toBe("copy");
    expect(plan.uncovered).toBe(["LHBNC", "BHLNC"].includes(layout) ? "masked" : "zeroed");
  },
);

test("each pair of memory types has its own list", () => {
  const plan = samplePlan({}, region({ memoryType: "VRAM" }));
  const request = planRequest(plan, { localBlockIds: [[1, 2]], remoteBlockIds: [[4, 5]] });
  expect(
    plan.sources[0]?.lists.map((list) => [list.localMemoryType, list.remoteMemoryType]),
  ).toEqual([
    ["DRAM", "DRAM"],
    ["DRAM", "VRAM"],
  ]);
  expect(request.reads.map((read) => [read.listIndex, [...read.runs]])).toEqual([
    [0, [1, 4, 2]],
    [1, [1, 4, 2]],
  ]);
});

test("copies blocks whose cells have no known places unchanged, and zeroes nothing: of a backend with its own order, or padded hybrid pages", () => {
  const copied = (rank: RankGeometry, groups: readonly string[] = ["full"]) => {
    const { form, blockOrder, uncovered } = samplePlan(rank, rank, { groups });
    return [form, blockOrder, uncovered];
  };
  expect(copied(sampleRank({ attentionBackend: "CPU_ATTN" }))).toEqual([
    "copy",
    "opaque",
    "masked",
  ]);
  const padded = (tpSize: number, bytes: number) => {
    const rank = sampleRank({ tpSize, stateSpace: { convBytes: 32, recurrentBytes: 64 } });
    const page = { blockLengthBytes: bytes, blockStrideBytes: bytes };
    return copied(
      withRegions(rank, (_, index) => (index === 0 ? page : {})),
      ["full", "mamba"],
    );
  };
  // Four heads of 16 tokens do not divide 516 bytes; nor do the tokens of one head 132.
  expect(padded(1, 516)).toEqual(["copy", "opaque", "masked"]);
  expect(padded(1, 512)).toEqual(["copy", "head-major", "zeroed"]);
  expect(padded(4, 132)).toEqual(["copy", "token-major", "zeroed"]);
});

test("builds each table once, and its size does not depend on the number of blocks", () => {
  const rows = (numBlocks: number, padding: number) => {
    const grown = (rank: RankGeometry) =>
      withRegions(rank, ({ blockStrideBytes }) => ({
        numBlocks,
        blockStrideBytes: blockStrideBytes + padding,
      }));
    const [source] = samplePlan(
      grown(sampleRank({ kernelBlockSize: 32 })),
      grown(sampleRank()),
    ).sources;
    expect(source?.localTable).toBe(source?.localTable);
    return [source?.localTable.rows.length, source?.remoteTable.rows.length];
  };
  expect(rows(10, 0)).toEqual([2 * 5, 2 * 5]);
  expect(rows(10_000, 0)).toEqual(rows(10, 0));
  expect(rows(10_000, 64)).toEqual([2 * 2 * 5, 2 * 5]);
});

test.each<[string, Parameters<typeof samplePlan>, readonly string[]]>([
  ["equal pieces in all regions", [], ["list 0: 512@0"]],
  ["shares", [{}, {}, { remotes: remotesOf(2) }], ["list 0: 256@0", "list 0: 256@256"]],
  ["parts", [{ kernelBlockSize: 32 }], ["list 0: 512@0/2*512"]],
  [
    "several pieces",
    [{}, { kernelBlockSize: 32 }, { numKvHeads: 4 }],
    ["list 0: 128@0 128@128 128@256 128@384"],
  ],
  [
    "regions that differ",
    [hybrid, hybrid, { groups: ["full", "mamba"] }],
    ["list 0: 512@0 | state 32@0 state 64@32 = 0:0,1:1"],
  ],
  [
    "memory types",
    [{}, region({ memoryType: "VRAM" })],
    ["list 0: 512@0 = 0:0", "list 1: 512@0 = 1:0"],
  ],
])("a list's key says what is in its local table: %s", (_what, given, keys) => {
  const lists = samplePlan(...given).sources.flatMap((source) => source.lists);
  expect(lists.map(({ localListKey }) => localListKey)).toEqual(keys);
});

test("descriptors carry their region's device, and at most 2^31 - 1 have an index", () => {
  const [source] = samplePlan(region({ deviceId: 3 }), {}).sources;
  expect([...(source?.localTable.rows ?? [])].filter((_, at) => at % 5 === 2)).toEqual([0, 3]);
  const many = (numBlocks: readonly [number, number]) =>
    withRegions(sampleRank({ layout: "LBNHC", tpSize: 2 }), (_, index) => ({
      baseAddress: index * 2 ** 45,
      numBlocks: numBlocks[index] ?? 0,
    }));
  expect(samplePlan(many([2 ** 30, 2 ** 30 - 1]), many([4, 4])).form).toBe("copy");
});

describe("stages of a pipeline", () => {
  /** A rank that holds some of the regions of another, as one of two stages. */
  const stageOf = (rank: RankGeometry, ppRank: number, regions: readonly number[]) => ({
    ...rank,
    ppRank,
    ppSize: 2,
    regions: rank.regions.filter((_, index) => regions.includes(index)),
  });
  const whole = sampleRank();

  test("are read in stage order, regardless of the order of the remotes", () => {
    const remotes = [stageOf(whole, 1, [1]), stageOf(whole, 0, [0])];
    const plan = samplePlan({}, {}, { remotes });
    expect(plan.stages).toEqual([0, 1]);
    expect(plan.sources.map(({ remotePpRank, segments }) => [remotePpRank, segments])).toEqual([
      [0, [0]],
      [1, [1]],
    ]);
  });

  test("must together hold every cache of the local rank", () => {
    expect(() => samplePlan({}, {}, { remotes: [stageOf(whole, 1, [1])] })).toThrow(
      'no remote rank that is given holds the cache "layer.0"',
    );
    const { ppRank: _none, ...unnumbered } = stageOf(whole, 0, [1]);
    for (const [remote, ranks] of [
      [stageOf(whole, 1, [1]), [[1, 0]]],
      [unnumbered, [[0, 0]]],
    ] as const) {
      const { code, details } = refusal(() => samplePlan({}, {}, { remotes: [remote] }));
      expect([code, details]).toEqual(["KV_PLAN_INCOMPATIBLE", { region: "layer.0", ranks }]);
    }
  });

  test("with only layers of fewer heads are mapped by the heads of those layers", () => {
    // Layer 1 is in group 1, which has two heads. Each of the four remote ranks holds one head, so
    // two ranks hold the same head.
    const own = (rank: RankGeometry, lengths: readonly number[]) =>
      withRegions(rank, (_, groupId) => {
        const bytes = lengths[groupId] ?? 0;
        return { groupId, blockLengthBytes: bytes, blockStrideBytes: bytes };
      });
    const remotes = [0, 1, 2, 3].flatMap((tpRank) => {
      const rank = own(sampleRank({ tpRank, tpSize: 4 }), [128, 128]);
      return [stageOf(rank, 0, [0]), stageOf(rank, 1, [1])];
    });
    const plan = samplePlan(own(whole, [512, 256]), whole, {
      groups: ["full", "swa"],
      remotes,
      groupKvHeads: [4, 2],
    });
    expect(plan.headsOfRegion).toEqual([4, 2]);
    expect(plan.sources.map(({ remotePpRank, remoteRank }) => [remotePpRank, remoteRank])).toEqual([
      ...[0, 1, 2, 3].map((rank) => [0, rank]),
      ...[0, 1, 2, 3].map((rank) => [1, rank]),
    ]);
    expect(plan.sources.map(({ segments }) => segments)).toEqual([
      [0],
      [0],
      [0],
      [0],
      [1],
      [],
      [1],
      [],
    ]);
  });
});

test("each group lists its regions, and state segments come after all attention segments", () => {
  const plan = samplePlan(hybrid, hybrid, { groups: ["full", "mamba"] });
  expect(plan.regionsOfGroup).toEqual([[0], [1]]);
  expect(plan.segments.map(({ region, piece }) => [region, piece])).toEqual([
    [0, ""],
    [1, "conv 0"],
    [1, "state"],
  ]);
  expect(plan.remoteIndexing.map(({ offset, count }) => [offset, count])).toEqual([
    [0, 10],
    [10, 10],
    [20, 10],
  ]);
});

test("a region without groups is not moved", () => {
  const rank = sampleRank();
  const none = withRegions(rank, () => ({ groupIds: [] }));
  expect(samplePlan(none, none)).toMatchObject({
    segments: [],
    sources: [],
    remoteIndexing: [],
    localIndexing: [],
    regionsOfGroup: [[]],
  });
});

test("latents are read from one rank without a split by head, and the ranks with copies are only notified", () => {
  const latents = (tpRank: number) => sampleRank({ tpRank, tpSize: 2, blockLengthBytes: 1024 });
  const remotes = [latents(0), latents(1)];
  const whole = sampleRank({ blockLengthBytes: 1024 });
  const plan = samplePlan(whole, whole, { groups: ["mla"], remotes, numKvHeads: 3 });
  expect(plan.sources.map(({ remoteRank }) => remoteRank)).toEqual([0]);
  expect(plan.notifyOnlyRanks).toEqual([1]);
  expect(plan.headsOfRegion).toEqual([1, 1]);
  // Three heads could not be split over two.
  const equal = { ...samplePair(latents(0), latents(0), ["mla"]), numKvHeads: 3 };
  expect(buildEngineTransferPlan(equal).form).toBe("copy");
});

describe("conversions", () => {
  const pair = (
    local: object,
    remote: object,
    conversions: readonly ("hnd-to-nhd" | "attention-order")[],
  ) => ({
    ...samplePair(sampleRank(local), sampleRank(remote)),
    conversions,
  });

  test("hnd-to-nhd is used by the permute form, and not by the direct form", () => {
    const turned = pair({ layout: "LBNHC" }, {}, ["hnd-to-nhd"]);
    expect(buildEngineTransferPlan(turned)).toMatchObject({
      form: "permute",
      conversions: ["hnd-to-nhd"],
      blockOrder: "token-major",
    });
    expect(buildEngineTransferPlan({ ...turned, form: "direct" })).toMatchObject({
      form: "direct",
      conversions: [],
    });
  });

  test("attention-order is kept in every form when the backends differ, because the engine does it", () => {
    const other = pair({ kernelBlockSize: 32 }, { attentionBackend: "TRITON_ATTN" }, [
      "attention-order",
    ]);
    expect(buildEngineTransferPlan({ ...other, form: "direct" })).toMatchObject({
      form: "direct",
      conversions: ["attention-order"],
    });
    for (const [local, remote] of [
      ["FLASH_ATTN", "CPU_ATTN"],
      ["CPU_ATTN", "FLASH_ATTN"],
    ] as const) {
      const packed = pair({ attentionBackend: local }, { attentionBackend: remote }, [
        "attention-order",
      ]);
      expect(buildEngineTransferPlan(packed)).toMatchObject({
        form: "copy",
        conversions: ["attention-order"],
        blockOrder: "opaque",
        uncovered: "masked",
      });
    }
  });
});

test("blockOrder is token-major for one head, and opaque for a layout that spreads heads", () => {
  const order = (layout: "LBHNC" | "LHBNC", tpSize: number) => {
    const rank = sampleRank({ layout, tpSize });
    return samplePlan(rank, rank).blockOrder;
  };
  expect([order("LBHNC", 1), order("LBHNC", 4), order("LHBNC", 4)]).toEqual([
    "head-major",
    "token-major",
    "opaque",
  ]);
});
