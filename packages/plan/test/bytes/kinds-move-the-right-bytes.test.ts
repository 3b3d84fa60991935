import type { KvCacheKind } from "@kv/interface";
import { expect, test } from "vitest";
import {
  applyReceivePass,
  buildEngineTransferPlan,
  planRequest,
  type RankGeometry,
} from "../../src/index.js";
import { provePlan } from "../../src/prove/index.js";
import type { CacheSpec, KindEngine } from "./kind-memory.js";
import { type KindScene, moveKinds } from "./kind-scenes.js";

// Random pairs of all kinds move their bytes in ../prove/proof.test.ts.

const ENGINE: KindEngine = { tpSize: 1, kernelTokens: 8, perLogical: 1, logicalBlocks: 40 };

interface Model {
  readonly groups: readonly KvCacheKind[];
  readonly caches: readonly CacheSpec[];
}

interface Scene extends Omit<Partial<KindScene>, "groups" | "caches" | "prefill" | "decode"> {
  readonly prefill?: Partial<KindEngine>;
  readonly decode?: Partial<KindEngine>;
}

function run(model: Model, { prefill, decode, ...scene }: Scene = {}) {
  return moveKinds({
    numKvHeads: 4,
    numTokens: 61,
    computedBlocks: 0,
    windowBlocks: Number.POSITIVE_INFINITY,
    states: 1,
    seed: 1,
    form: undefined,
    ...model,
    ...scene,
    prefill: { ...ENGINE, ...prefill },
    decode: { ...ENGINE, ...decode },
  });
}

const layers = (...specs: readonly Omit<CacheSpec, "name">[]) =>
  specs.map((spec, index): CacheSpec => ({ name: `layer.${index}`, ...spec }));
const both = (spec: Omit<CacheSpec, "name">) => layers(spec, spec);
const sourceGroups = ({ made }: ReturnType<typeof run>) =>
  made[0]?.plan.sources.map(({ groups }) => [...groups]);

const state = { projections: [64, 32, 32], recurrent: 256 };
const DENSE: Model = { groups: ["full"], caches: both({ groups: [0], heads: 4 }) };
const LATENT: Model = { groups: ["mla"], caches: both({ groups: [0] }) };
const HYBRID: Model = {
  groups: ["full", "mamba"],
  caches: both({ groups: [0, 1], heads: 4, state }),
};

test.each([
  [1, 1],
  [2, 1],
  [1, 2],
  [4, 2],
  [2, 8],
  [8, 4],
])(
  "H3: prefill TP %i, decode TP %i: states beside attention, and in larger regions of their own",
  (p, d) => {
    const engines = { prefill: { tpSize: p }, decode: { tpSize: d } };
    run(HYBRID, engines);
    const own = { groups: [1], state: { projections: [256, 128], recurrent: 2048 } };
    run({ groups: ["full", "mamba"], caches: layers({ groups: [0], heads: 4 }, own) }, engines);
    run({ groups: ["mla", "mamba"], caches: layers({ groups: [0] }, own) }, engines);
  },
);

test("131 kernel blocks per logical block at TP 4, 261 at TP 1 (Nemotron hybrid 30B)", () => {
  run(HYBRID, {
    prefill: { tpSize: 4, perLogical: 131, logicalBlocks: 8 },
    decode: { perLogical: 261, logicalBlocks: 6 },
    numTokens: 3001,
  });
});

test("replicated heads and latents are read once, and states from every source", () => {
  const caches = both({ groups: [0, 1], heads: 2, state });
  const replicated = run({ ...HYBRID, caches }, { numKvHeads: 2, prefill: { tpSize: 8 } });
  const once = [[0, 1], [1], [1], [1]];
  expect(sourceGroups(replicated)).toEqual([...once, ...once]);
  const small = { projections: [64], recurrent: 64 };
  const latents = run(
    { groups: ["mla", "mamba"], caches: both({ groups: [0, 1], state: small }) },
    { prefill: { tpSize: 2, kernelTokens: 64 }, decode: { kernelTokens: 64 } },
  );
  expect(sourceGroups(latents)).toEqual([[0, 1], [1]]);
});

test("state descriptors come after all attention descriptors and count logical blocks", () => {
  const two = { perLogical: 2 };
  const [{ plan } = expect.fail("no plan")] = run(HYBRID, { decode: two, prefill: two }).made;
  const pieces = ["conv 0", "conv 1", "conv 2", "state"];
  expect(plan.segments.map(({ piece, region, unit }) => [region, piece, unit])).toEqual([
    ...[0, 1].map((region) => [region, "", "kernel-block"]),
    ...[0, 1].flatMap((region) => pieces.map((piece) => [region, piece, "logical-block"])),
  ]);
  const counts = plan.localIndexing.map(({ count }) => count);
  expect(counts).toEqual([80, 80, ...new Array(8).fill(40)]);
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
  for (const numTokens of [61, 64, 5])
    run(LATENT, { numTokens, prefill: dcp(pTp, pDcp), decode: dcp(dTp, dDcp) });
});

test("compressed latents: moves whole blocks with cells of several tokens, and leaves the last block to be masked", () => {
  // Two cells of 20 bytes for 16 tokens, as with one latent for 8 tokens; a block that divides
  // beside it.
  const rank = (base: number, times = 1): RankGeometry => ({
    tpRank: 0,
    tpSize: 1,
    kernelBlockSize: 16 * times,
    physicalBlocksPerLogical: 2,
    layout: "LBHNC",
    attentionBackend: "FLASHMLA",
    deviceId: 0,
    regions: [40 * times, 64 * times].map((blockLengthBytes, index) => ({
      name: `layer.${index}`,
      baseAddress: base + index * 2 ** 20,
      numBlocks: 10,
      blockLengthBytes,
      blockStrideBytes: blockLengthBytes,
      groupId: 0,
      memoryType: "DRAM",
    })),
  });
  const remotes = [rank(2 ** 40)];
  const planOf = (local: RankGeometry) =>
    buildEngineTransferPlan({ local, remotes, numKvHeads: 1, groups: ["mla"] });
  const plan = planOf(rank(2 ** 30));
  expect(provePlan(plan, { remotes, numKvHeads: 1 })).toMatchObject({ proven: true });
  const request = planRequest(plan, {
    localBlockIds: [[1, 2]],
    remoteBlockIds: [[3, 4]],
    numTokens: 37,
    localComputedBlocks: [0],
  });
  expect(request.lengthBytes).toBe(3 * (40 + 64));
  const bytes = [40, 64].map((length) => new Uint8Array(10 * length).fill(1));
  if (request.receivePass === undefined) throw new Error("blocks beyond the end are not zeroed");
  applyReceivePass(plan, request.receivePass, bytes);
  const zeroes = (block: number) =>
    bytes.map((all) => {
      const length = all.length / 10;
      return all.subarray(block * length, (block + 1) * length).filter((byte) => byte === 0).length;
    });
  // Kernel block 4 holds tokens 32 to 36: of cells for one token each, 11 are zeroed; block 5
  // holds none.
  expect([zeroes(4), zeroes(5)]).toEqual([
    [0, 11 * 4],
    [40, 64],
  ]);
  expect(() => planOf(rank(2 ** 30, 2))).toThrow(
    "a block of 80 bytes does not divide into 1 heads of 32 tokens",
  );
});

test("moves equally packed rows whole", () => {
  const { made } = run(LATENT, { prefill: { packed: true }, decode: { packed: true } });
  expect(made[0]?.plan.segments).toHaveLength(1);
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
    const caches = layers({ groups: [0], heads: 4, blockTimes: 2 }, { groups: [1], heads: 16 });
    const { made } = run(
      { groups: ["full", "swa"], caches },
      {
        numKvHeads: 16,
        windowBlocks: 3,
        prefill: { layout: pLayout, tpSize: p },
        decode: { layout: dLayout, tpSize: d },
      },
    );
    const tokens = made[0]?.plan.groupPlans.map(({ partTokens }) => partTokens);
    expect([made[0]?.plan.form, tokens]).toEqual(["direct", [1, 1]]);
  },
);

test.each([
  ["cells of other bytes", { heads: 2 }],
  ["blocks of more tokens", { heads: 2, blockTimes: 4 }],
])("groups with different heads share all regions: %s", (_what, own) => {
  for (const of of [{ 0: own }, { 1: own }]) {
    const model: Model = {
      groups: ["full", "swa"],
      caches: layers({ groups: [0, 1], heads: 8, of }),
    };
    const scene = { numKvHeads: 8, windowBlocks: 2 };
    run(model, scene);
    run(model, { ...scene, prefill: { tpSize: 2 } });
    run(model, { ...scene, decode: { tpSize: 2 } });
    // Block sizes that differ take the pass, which turns each group's blocks by its own heads.
    const { made } = run(model, { numKvHeads: 8, decode: { kernelTokens: 16 } });
    expect(made[0]?.plan.form).toBe("permute");
    expect(() => run(model, { ...scene, prefill: { tpSize: 2 }, decode: { tpSize: 4 } })).toThrow(
      /shared by groups whose KV heads are split over the ranks differently: local 1 heads of group . in a block, 2 of another, remote 1 .* 4 of another/,
    );
  }
});

test("circular scratch: moves whole blocks and zeroes nothing", () => {
  const caches = layers({ groups: [0] }, { groups: [0] }, { groups: [1] });
  const { made } = run({ groups: ["mla", "circular"], caches }, { numTokens: 16, states: 2 });
  expect(made[0]?.request.receivePass).toBeUndefined();
});

test("separate regions for K and V", () => {
  const caches = [1, 2, 3, 4].map((half): CacheSpec => {
    return { name: `layer.${half >> 1}.${half}`, groups: [0], heads: 4 };
  });
  run({ groups: ["full"], caches }, { prefill: { tpSize: 2 }, decode: { kernelTokens: 16 } });
});

test("a pipeline stage has no descriptors for a type of memory that it lacks", () => {
  const caches = layers({ groups: [0], heads: 4 }, { groups: [0], heads: 4, memoryType: "VRAM" });
  const { made } = run({ ...DENSE, caches }, { prefill: { stages: [[0], [1]], tpSize: 2 } });
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

test("two pipeline stages with the same cache are refused", () => {
  expect(() => run(DENSE, { prefill: { stages: [[0, 1], [1]] } })).toThrow(
    'cache "layer.1" is on the remote pipeline stages 0 and 1',
  );
});

// The rules of tools/conformance/beyond.ts.
test.each<[string, Scene]>([
  ["prefill TP 8 above 4 KV heads", { prefill: { tpSize: 8 } }],
  ["prefill TP 8 above 4 KV heads, decode TP 4", { prefill: { tpSize: 8 }, decode: { tpSize: 4 } }],
  [
    "more prefill ranks with smaller blocks",
    { prefill: { tpSize: 4 }, decode: { kernelTokens: 16 } },
  ],
  [
    "prefill TP 8 with smaller blocks",
    { prefill: { tpSize: 8 }, decode: { tpSize: 2, kernelTokens: 16 } },
  ],
  ["decode blocks smaller than prefill's", { prefill: { kernelTokens: 16 } }],
  [
    "decode blocks of 24 tokens, prefill's of 16",
    { prefill: { kernelTokens: 16 }, decode: { kernelTokens: 24 } },
  ],
  [
    "device and host memory with other blocks",
    { prefill: { memoryType: "VRAM", kernelTokens: 4, tpSize: 2 } },
  ],
  ["layouts of one order", { prefill: { layout: "BLHNC" } }],
  ["head-major blocks filled from token-major ones", { prefill: { layout: "LBNHC", tpSize: 2 } }],
  [
    "token-major blocks filled from head-major ones",
    { prefill: { tpSize: 2 }, decode: { layout: "LBNHC" } },
  ],
  [
    "token-major blocks split by head",
    { prefill: { layout: "LBNHC" }, decode: { layout: "LBNHC", tpSize: 2 } },
  ],
])("beyond: %s", (_rule, scene) => {
  run(DENSE, { computedBlocks: 1, ...scene });
  if (scene.prefill?.layout === undefined && scene.decode?.layout === undefined) run(HYBRID, scene);
});
