import type { KvCacheKind } from "@kv/interface";
import { describe, expect, test } from "vitest";
import {
  applyReceivePass,
  buildEngineTransferPlan,
  planRequest,
  type RankGeometry,
} from "../../src/index.js";
import { provePlan } from "../../src/prove/index.js";
import type { CacheSpec, KindEngine } from "./kind-memory.js";
import { type KindScene, moveKinds } from "./kind-scenes.js";

const ENGINE: KindEngine = { tpSize: 1, kernelTokens: 8, perLogical: 1, logicalBlocks: 40 };

interface Scene extends Omit<Partial<KindScene>, "prefill" | "decode"> {
  readonly groups: readonly KvCacheKind[];
  readonly caches: readonly CacheSpec[];
  readonly prefill?: Partial<KindEngine>;
  readonly decode?: Partial<KindEngine>;
}

function run({ prefill, decode, ...scene }: Scene) {
  return moveKinds({
    numKvHeads: 4,
    numTokens: 61,
    computedBlocks: 0,
    windowBlocks: Number.POSITIVE_INFINITY,
    states: 1,
    seed: 1,
    form: undefined,
    ...scene,
    prefill: { ...ENGINE, ...prefill },
    decode: { ...ENGINE, ...decode },
  });
}

const dense: readonly CacheSpec[] = [
  { name: "layer.0", groups: [0], heads: 4 },
  { name: "layer.1", groups: [0], heads: 4 },
];
const latent: readonly CacheSpec[] = [
  { name: "layer.0", groups: [0] },
  { name: "layer.1", groups: [0] },
];
const hybrid: readonly CacheSpec[] = ["layer.0", "layer.1"].map((name) => ({
  name,
  groups: [0, 1],
  heads: 4,
  state: { projections: [64, 32, 32], recurrent: 256 },
}));

const sampleLatent = {
  tpRank: 0,
  tpSize: 1,
  kernelBlockSize: 16,
  physicalBlocksPerLogical: 2,
  layout: "LBHNC",
  attentionBackend: "FLASHMLA",
  deviceId: 0,
} as const;

describe("state-space hybrids", () => {
  const pairs = [
    [1, 1],
    [2, 1],
    [1, 2],
    [4, 2],
    [2, 8],
    [8, 4],
  ] as const;
  test.each(pairs)(
    "prefill TP %i, decode TP %i: splits the projections and the state separately",
    (p, d) => {
      const { told } = run({
        groups: ["full", "mamba"],
        caches: hybrid,
        prefill: { tpSize: p },
        decode: { tpSize: d },
      });
      for (const count of told.values()) expect(count).toBe(Math.max(1, d / p));
      expect(told.size).toBe(p);
    },
  );

  test("different numbers of kernel blocks per logical block, as with TP 4 and TP 1", () => {
    run({
      groups: ["full", "mamba"],
      caches: hybrid,
      prefill: { tpSize: 4, perLogical: 5 },
      decode: { perLogical: 3 },
      numTokens: 77,
    });
  });

  test("131 kernel blocks per logical block at TP 4, 261 at TP 1 (Nemotron hybrid 30B)", () => {
    run({
      groups: ["full", "mamba"],
      caches: hybrid,
      prefill: { tpSize: 4, perLogical: 131, logicalBlocks: 8 },
      decode: { perLogical: 261, logicalBlocks: 6 },
      numTokens: 3001,
    });
  });

  test("one projection (Mamba 1)", () => {
    const caches = [
      { name: "layer.0", groups: [0, 1], heads: 2, state: { projections: [128], recurrent: 64 } },
    ];
    run({
      groups: ["full", "mamba"],
      caches,
      numKvHeads: 2,
      prefill: { tpSize: 4 },
      decode: { tpSize: 2 },
    });
  });

  test("replicated heads: reads every source's state, and each head once", () => {
    const caches = hybrid.map((cache) => ({ ...cache, heads: 2 }));
    const { made } = run({
      groups: ["full", "mamba"],
      caches,
      numKvHeads: 2,
      prefill: { tpSize: 8 },
    });
    const plan = made[0]?.plan;
    expect(plan?.sources.map(({ groups }) => [...groups])).toEqual([
      [0, 1],
      [1],
      [1],
      [1],
      [0, 1],
      [1],
      [1],
      [1],
    ]);
  });

  test("MLA with state: reads the latent once and the state from all ranks", () => {
    const caches = latent.map((cache) => ({
      ...cache,
      groups: [0, 1],
      state: { projections: [64], recurrent: 64 },
    }));
    const { made } = run({
      groups: ["mla", "mamba"],
      caches,
      prefill: { tpSize: 2, kernelTokens: 64 },
      decode: { kernelTokens: 64 },
    });
    expect(made[0]?.plan.sources.map(({ groups }) => [...groups])).toEqual([[0, 1], [1]]);
  });

  test("reads the last of several states into the first local state block", () => {
    const { made } = run({ groups: ["full", "mamba"], caches: hybrid });
    const plan = made[0]?.plan;
    if (plan === undefined) throw new Error("no plan");
    const states = (local: number[], remote: number[]) => {
      const [read] = planRequest(plan, {
        localBlockIds: [[], local],
        remoteBlockIds: [[], remote],
      }).reads;
      const begin = [plan.localIndexing[2]?.offset ?? 0, plan.remoteIndexing[2]?.offset ?? 0, 0];
      return [...(read?.runs.slice(0, 3) ?? [])].map((value, index) => value - (begin[index] ?? 0));
    };
    expect(states([5], [3, 9])).toEqual([5, 9, 1]);
    expect(states([5, 6], [9])).toEqual([5, 9, 1]);
    expect(() => states([5, 6, 7], [9])).toThrow(
      /3 local blocks of state cannot be filled from 1 remote/,
    );
  });

  test("state descriptors come after all attention descriptors and count logical blocks", () => {
    const { made } = run({
      groups: ["full", "mamba"],
      caches: hybrid,
      decode: { perLogical: 2 },
      prefill: { perLogical: 2 },
    });
    const plan = made[0]?.plan;
    expect(
      plan?.segments.map(({ piece, region, unit }) =>
        `${region} ${piece} ${unit}`.replace("  ", " "),
      ),
    ).toEqual([
      "0 kernel-block",
      "1 kernel-block",
      ...[0, 1].flatMap((region) =>
        ["conv 0", "conv 1", "conv 2", "state"].map((piece) => `${region} ${piece} logical-block`),
      ),
    ]);
    expect(plan?.localIndexing.map(({ count }) => count)).toEqual([
      80,
      80,
      ...new Array(8).fill(40),
    ]);
  });
});

describe("MLA", () => {
  test.each([
    [1, 1],
    [4, 1],
    [4, 2],
    [2, 4],
  ])("prefill TP %i, decode TP %i: reads one copy and notifies every rank", (p, d) => {
    const { told } = run({
      groups: ["mla"],
      caches: latent,
      prefill: { tpSize: p },
      decode: { tpSize: d },
    });
    expect([...told.values()]).toEqual(new Array(p).fill(Math.max(1, d / p)));
  });

  test.each([
    [1, 4, 4, 1],
    [4, 4, 1, 1],
    [2, 2, 4, 4],
    [4, 4, 2, 2],
    [4, 4, 4, 4],
    // DCP groups are smaller than the engine, so several ranks have each slice.
    [4, 2, 1, 1],
    [8, 2, 2, 1],
    [8, 4, 4, 2],
    [4, 2, 4, 2],
    [2, 2, 8, 4],
    [2, 1, 4, 2],
    [8, 1, 4, 2],
  ])("blocks sharded by DCP: prefill TP %i DCP %i, decode TP %i DCP %i", (pTp, pDcp, dTp, dDcp) => {
    const dcp = (tp: number, size: number) => ({ tpSize: tp, dcpSize: Math.min(tp, size) });
    for (const numTokens of [61, 64, 5]) {
      const engines = { prefill: dcp(pTp, pDcp), decode: dcp(dTp, dDcp) };
      const { made, told } = run({ groups: ["mla"], caches: latent, numTokens, ...engines });
      // Every prefill rank gets as many notifications as it waits for.
      expect([...told.values()]).toEqual(new Array(pTp).fill(made[0]?.plan.localConsumers));
    }
  });

  test("a draft split by head under an MLA target, more ranks on either side", () => {
    const caches: readonly CacheSpec[] = [...latent, { name: "layer.2", groups: [1], heads: 4 }];
    for (const [p, d] of [
      [1, 2],
      [2, 2],
      [4, 1],
      [8, 2],
    ] as const) {
      const { told } = run({
        groups: ["mla", "full"],
        caches,
        prefill: { tpSize: p },
        decode: { tpSize: d },
      });
      expect(told.size).toBe(p);
    }
  });

  test.each(["LHBNC", "BHLNC"] as const)(
    "%s with two block sizes: moves blocks of one head in every layout",
    (layout) => {
      for (const [p, d] of [
        [16, 8],
        [8, 16],
      ] as const) {
        const prefill = { layout, kernelTokens: p, tpSize: 2 };
        run({ groups: ["mla"], caches: latent, prefill, decode: { layout, kernelTokens: d } });
      }
      const one = { layout, tpSize: 4 };
      run({ groups: ["full"], caches: dense, prefill: { ...one, kernelTokens: 16 }, decode: one });
    },
  );

  test("compressed latents: moves whole blocks with cells of several tokens, and leaves the last block to be masked", () => {
    // Two cells of 20 bytes for 16 tokens, as with one latent for 8 tokens; a block that divides
    // beside it.
    const rank = (base: number): RankGeometry => ({
      ...sampleLatent,
      regions: [40, 64].map((blockLengthBytes, index) => ({
        name: `layer.${index}`,
        baseAddress: base + index * 2 ** 20,
        numBlocks: 10,
        blockLengthBytes,
        blockStrideBytes: blockLengthBytes,
        groupId: 0,
        memoryType: "DRAM" as const,
      })),
    });
    const [local, remote] = [rank(2 ** 30), rank(2 ** 40)];
    const plan = buildEngineTransferPlan({
      local,
      remotes: [remote],
      numKvHeads: 1,
      groups: ["mla"],
    });
    expect(provePlan(plan, { remotes: [remote], numKvHeads: 1 })).toMatchObject({ proven: true });
    const request = planRequest(plan, {
      localBlockIds: [[1, 2]],
      remoteBlockIds: [[3, 4]],
      numTokens: 37,
      localComputedBlocks: [0],
    });
    expect(request.lengthBytes).toBe(3 * (40 + 64));
    const bytes = local.regions.map(({ blockLengthBytes }) =>
      new Uint8Array(10 * blockLengthBytes).fill(1),
    );
    if (request.receivePass === undefined) throw new Error("blocks beyond the end are not zeroed");
    applyReceivePass(plan, request.receivePass, bytes);
    const zeroes = (region: number, block: number, length: number) =>
      (bytes[region] as Uint8Array)
        .subarray(block * length, (block + 1) * length)
        .filter((byte) => byte === 0).length;
    // Kernel block 4 holds tokens 32 to 36: of cells for one token each, 11 are zeroed; block 5
    // holds none.
    expect([zeroes(0, 4, 40), zeroes(1, 4, 64)]).toEqual([0, 11 * 4]);
    expect([zeroes(0, 5, 40), zeroes(1, 5, 64)]).toEqual([40, 64]);
    expect(() =>
      buildEngineTransferPlan({
        local: {
          ...local,
          kernelBlockSize: 32,
          regions: local.regions.map((region) => ({
            ...region,
            blockLengthBytes: 2 * region.blockLengthBytes,
            blockStrideBytes: 2 * region.blockStrideBytes,
          })),
        },
        remotes: [remote],
        numKvHeads: 1,
        groups: ["mla"],
      }),
    ).toThrow(/a block of 80 bytes does not divide into 1 heads of 32 tokens/);
  });

  test("reads packed rows into one region per layer", () => {
    run({ groups: ["mla"], caches: latent, prefill: { packed: true } });
  });

  test("reads packed rows of several groups", () => {
    const caches: readonly CacheSpec[] = [
      { name: "layer.0", groups: [0] },
      { name: "layer.1", groups: [1] },
    ];
    run({ groups: ["mla", "swa-mla"], caches, windowBlocks: 3, prefill: { packed: true } });
  });

  test("moves equally packed rows whole", () => {
    const { made } = run({
      groups: ["mla"],
      caches: latent,
      prefill: { packed: true },
      decode: { packed: true },
    });
    expect(made[0]?.plan.segments).toHaveLength(1);
  });
});

describe("groups", () => {
  const pair = (heads: number): readonly CacheSpec[] => [
    { name: "layer.0", groups: [0], heads },
    { name: "layer.1", groups: [1], heads },
  ];

  test("a sliding window: moves only its blocks, at equal and different TP sizes", () => {
    for (const [p, d] of [
      [1, 1],
      [2, 1],
      [1, 4],
    ] as const) {
      const { made } = run({
        groups: ["full", "swa"],
        caches: pair(4),
        windowBlocks: 3,
        prefill: { tpSize: p },
        decode: { tpSize: d },
      });
      expect(made[0]?.request.reads[0]?.descriptorCount).toBe(8 + 3);
    }
  });

  test("groups with different tokens per block and different heads", () => {
    const caches: readonly CacheSpec[] = [
      { name: "layer.0", groups: [0], heads: 4 },
      { name: "layer.1", groups: [1], heads: 2, blockTokens: 16 },
    ];
    const plain = { groups: ["full", "swa"] as const, caches, windowBlocks: 2 };
    run(plain);
    run({ ...plain, prefill: { tpSize: 2 } });
    run({ ...plain, decode: { tpSize: 2 } });
  });

  test.each([
    ["LBNHC", 2, "LBNHC", 4],
    ["LBNHC", 4, "LBNHC", 2],
    ["LBNHC", 2, "LBHNC", 2],
    ["LBHNC", 1, "LBNHC", 8],
  ] as const)(
    "groups shaped as in Gemma 4, cut token by token: %s at TP %i, %s at TP %i",
    (pLayout, p, dLayout, d) => {
      // Full attention has fewer heads, and blocks of more tokens.
      const caches: readonly CacheSpec[] = [
        { name: "layer.0", groups: [0], heads: 4, blockTimes: 2 },
        { name: "layer.1", groups: [1], heads: 16 },
      ];
      const { made } = run({
        groups: ["full", "swa"],
        caches,
        numKvHeads: 16,
        windowBlocks: 3,
        prefill: { layout: pLayout, tpSize: p },
        decode: { layout: dLayout, tpSize: d },
      });
      const [plan] = made.map((one) => one.plan);
      expect([plan?.form, plan?.groupPlans.map(({ partTokens }) => partTokens)]).toEqual([
        "direct",
        [1, 1],
      ]);
    },
  );

  test("some groups share regions (group id -1)", () => {
    const caches: readonly CacheSpec[] = [
      { name: "layer.0", groups: [0, 1], heads: 4 },
      { name: "layer.1", groups: [2], heads: 4 },
    ];
    run({ groups: ["full", "full", "full"], caches, prefill: { tpSize: 2 } });
  });

  test.each([
    ["cells of other bytes", { heads: 2 }],
    ["blocks of more tokens", { heads: 2, blockTimes: 4 }],
  ])("groups with different heads share all regions: %s", (_what, own) => {
    for (const of of [{ 0: own }, { 1: own }]) {
      const caches: readonly CacheSpec[] = [{ name: "layer.0", groups: [0, 1], heads: 8, of }];
      const whole: Scene = { groups: ["full", "swa"], caches, numKvHeads: 8 };
      const scene = { ...whole, windowBlocks: 2 };
      run(scene);
      run({ ...scene, prefill: { tpSize: 2 } });
      run({ ...scene, decode: { tpSize: 2 } });
      // Block sizes that differ take the pass, which turns each group's blocks by its own heads.
      const { made } = run({ ...whole, decode: { kernelTokens: 16 } });
      expect(made[0]?.plan.form).toBe("permute");
      expect(() => run({ ...scene, prefill: { tpSize: 2 }, decode: { tpSize: 4 } })).toThrow(
        /shared by groups whose KV heads are split over the ranks differently: local 1 heads of group . in a block, 2 of another, remote 1 .* 4 of another/,
      );
    }
  });

  test("circular scratch: moves whole blocks and zeroes nothing", () => {
    const caches: readonly CacheSpec[] = [...latent, { name: "layer.2", groups: [1] }];
    const scene: Scene = { groups: ["mla", "circular"], caches, numTokens: 16, states: 2 };
    const { made } = run(scene);
    expect(made[0]?.request.receivePass).toBeUndefined();
  });

  test("circular scratch of several kernel blocks: moves all, and both sides need equal numbers", () => {
    const caches: readonly CacheSpec[] = [...latent, { name: "layer.2", groups: [1] }];
    const scene: Scene = {
      groups: ["mla", "circular"],
      caches,
      numTokens: 48,
      states: 2,
      prefill: { perLogical: 3 },
      decode: { perLogical: 3 },
    };
    // Two layers of 2 logical blocks, and 2 logical blocks of scratch, of 3 kernel blocks each.
    expect(run(scene).made[0]?.request.descriptorCount).toBe(2 * 2 * 3 + 2 * 3);
    expect(() => run({ ...scene, decode: { perLogical: 1 } })).toThrow(
      /group 1 \(circular\) is one piece of scratch.*local 1, remote 3/,
    );
  });

  test("separate regions for K and V", () => {
    const caches = ["layer.0", "layer.1"].flatMap((name, layer): CacheSpec[] => [
      { name: `${name}${layer}1`, groups: [0], heads: 4 },
      { name: `${name}${layer}2`, groups: [0], heads: 4 },
    ]);
    run({ groups: ["full"], caches, prefill: { tpSize: 2 }, decode: { kernelTokens: 16 } });
  });

  test("block strides larger than the block length on both sides", () => {
    run({
      groups: ["full"],
      caches: dense,
      prefill: { padding: 24, tpSize: 2 },
      decode: { padding: 8, kernelTokens: 16 },
    });
    run({
      groups: ["full", "mamba"],
      caches: hybrid,
      prefill: { padding: 24 },
      decode: { padding: 8, perLogical: 2 },
    });
  });

  test("regions in host and device memory: a list of each, and no rider", () => {
    const caches: readonly CacheSpec[] = [
      { name: "layer.0", groups: [0], heads: 4 },
      { name: "layer.1", groups: [0], heads: 4, memoryType: "VRAM" },
    ];
    const { made } = run({ groups: ["full"], caches });
    expect(made[0]?.request.reads.map(({ listIndex }) => listIndex)).toEqual([0, 1]);
  });

  test("device memory on one side, host memory on the other, with other block sizes", () => {
    run({
      groups: ["full"],
      caches: dense,
      prefill: { memoryType: "VRAM", kernelTokens: 4, tpSize: 2 },
      decode: { memoryType: "DRAM", kernelTokens: 8 },
    });
  });
});

describe("pipeline stages of the producer", () => {
  const stages = [[0], [1]];
  test("are matched by layer name", () => {
    const { told } = run({ groups: ["full"], caches: dense, prefill: { stages, tpSize: 2 } });
    expect(Object.fromEntries(told)).toEqual({ "0.0": 1, "0.1": 1, "1.0": 1, "1.1": 1 });
  });

  test("with different memory types: a stage has no descriptors for a type that it lacks", () => {
    const caches: readonly CacheSpec[] = [
      { name: "layer.0", groups: [0], heads: 4 },
      { name: "layer.1", groups: [0], heads: 4, memoryType: "VRAM" },
    ];
    const { made } = run({ groups: ["full"], caches, prefill: { stages, tpSize: 2 } });
    const rows = made[0]?.plan.sources.map(({ lists }) =>
      lists.map(({ remoteTable }) => remoteTable.rows.length > 0),
    );
    expect(rows).toEqual([
      [true, false],
      [true, false],
      [false, true],
      [false, true],
    ]);
  });

  test("are refused when two hold the same cache", () => {
    expect(() =>
      run({ groups: ["full"], caches: dense, prefill: { stages: [[0, 1], [1]] } }),
    ).toThrow(/cache "layer\.1" is on the remote pipeline stages 0 and 1/);
  });

  test("of several groups", () => {
    const caches: readonly CacheSpec[] = [
      { name: "layer.0", groups: [0], heads: 4 },
      { name: "layer.1", groups: [1], heads: 4 },
    ];
    const model = { groups: ["full", "swa"], caches, windowBlocks: 3 };
    run({ ...model, prefill: { stages } });
    run({ ...model, prefill: { stages }, decode: { tpSize: 2 } });
  });
});

describe("tensor parallel sizes", () => {
  test.each([
    [1, 1, 4],
    [2, 1, 4],
    [1, 2, 4],
    [8, 2, 4],
    [2, 8, 4],
    [8, 4, 2],
    [4, 8, 2],
  ])(
    "prefill TP %i, decode TP %i, %i heads: every decode rank gets all of its bytes, each once",
    (p, d, heads) => {
      const caches = dense.map((cache) => ({ ...cache, heads }));
      const { made } = run({
        groups: ["full"],
        caches,
        numKvHeads: heads,
        prefill: { tpSize: p },
        decode: { tpSize: d },
      });
      // 61 tokens in blocks of 8, two layers: what all decode ranks hold, each byte once.
      const held = d * Math.max(1, heads / d) * 8 * 8 * 4 * 2;
      expect(made.reduce((sum, { request }) => sum + request.lengthBytes, 0)).toBe(held);
      run({
        groups: ["mla"],
        caches: latent,
        prefill: { tpSize: p },
        decode: { tpSize: d },
      });
    },
  );
});
