import { isLongRun } from "@kv/testing/long-run";
import fc from "fast-check";
import { test, vi } from "vitest";
import { PROPERTY_TIMEOUT_MS } from "../property-timeout.js";
import { share } from "../share.js";
import type { CacheSpec, KindEngine } from "./kind-memory.js";
import { type KindScene, moveKinds } from "./kind-scenes.js";

const divides = (one: number, other: number) => one % other === 0 || other % one === 0;

type Layout = NonNullable<KindEngine["layout"]>;

interface SceneOptions {
  readonly mla?: boolean;
  readonly layouts?: readonly Layout[];
  /** Default: as `layouts`, the same on both sides. */
  readonly remoteLayouts?: readonly Layout[];
  /** Kernel blocks of both sides, `[local, remote]`; default: the local one a multiple. */
  readonly blocks?: readonly (readonly [number, number])[];
}

/** The groups of a model, and those whose blocks are in each cache. */
const GROUPINGS = [
  { groups: ["full"], caches: [[0], [0]] },
  { groups: ["full"], caches: [[0]] },
  { groups: ["full", "full"], caches: [[0], [1]] },
  {
    groups: ["full", "swa"],
    caches: [
      [0, 1],
      [0, 1],
    ],
  },
  { groups: ["full", "full"], caches: [[0], [0, 1], [1]] },
];
const LATENTS = [{ groups: ["mla"], caches: [[0], [0]] }];
const MULTIPLES = [1, 2, 4, 16].flatMap((remote) =>
  [1, 1, 2, 3, 4].map((ratio) => [remote * ratio, remote] as const),
);

function scenes(options: SceneOptions = {}): fc.Arbitrary<KindScene> {
  const { mla = false, layouts = ["LBHNC", "BLHNC"], blocks = MULTIPLES } = options;
  const sizes = fc
    .record({
      prefillTp: fc.integer({ min: 1, max: 8 }),
      decodeTp: fc.integer({ min: 1, max: 8 }),
      numKvHeads: mla ? fc.constant(1) : fc.constantFrom(1, 2, 3, 4, 6, 8, 12, 16),
    })
    .filter(
      ({ prefillTp, decodeTp, numKvHeads }) =>
        divides(prefillTp, decodeTp) &&
        (mla || (divides(prefillTp, numKvHeads) && divides(decodeTp, numKvHeads))),
    );
  return fc
    .record({
      sizes,
      grouping: fc.constantFrom(...(mla ? LATENTS : GROUPINGS)),
      layout: fc.constantFrom(...layouts),
      remoteLayout: fc.constantFrom(...(options.remoteLayouts ?? [undefined])),
      block: fc.constantFrom(...blocks),
      localPhysical: fc.constantFrom(1, 1, 2, 3),
      remotePhysical: fc.constantFrom(1, 1, 2, 3),
      padding: fc.record({ prefill: fc.constantFrom(0, 0, 12), decode: fc.constantFrom(0, 0, 20) }),
      tokenShare: share,
      computedShare: share,
      tellsComputed: fc.boolean(),
      seed: fc.nat({ max: 1000 }),
    })
    .map((draw): KindScene => {
      const { groups, caches } = draw.grouping;
      const { numKvHeads, prefillTp, decodeTp } = draw.sizes;
      const [localBlock, remoteBlock] = draw.block;
      const [localLogical, remoteLogical] = [
        localBlock * draw.localPhysical,
        remoteBlock * draw.remotePhysical,
      ];
      const numTokens =
        1 + Math.floor(draw.tokenShare * Math.min(200, 5 * Math.max(localLogical, remoteLogical)));
      const needed = Math.ceil(numTokens / localLogical);
      // Groups leave up to two blocks between their own, and none is block 0.
      const pool = (logical: number) => 1 + (Math.ceil(numTokens / logical) + 2) * groups.length;
      return {
        groups,
        caches: caches.map(
          (own, index): CacheSpec => ({
            name: `layer.${index}`,
            groups: own,
            ...(mla ? {} : { heads: numKvHeads }),
          }),
        ),
        numKvHeads,
        prefill: {
          tpSize: prefillTp,
          kernelTokens: remoteBlock,
          perLogical: draw.remotePhysical,
          padding: draw.padding.prefill,
          layout: draw.remoteLayout ?? draw.layout,
          logicalBlocks: pool(remoteLogical),
        },
        decode: {
          tpSize: decodeTp,
          kernelTokens: localBlock,
          perLogical: draw.localPhysical,
          padding: draw.padding.decode,
          layout: draw.layout,
          logicalBlocks: pool(localLogical),
        },
        numTokens,
        computedBlocks: Math.floor(draw.computedShare * needed * 0.99),
        tellsComputed: draw.tellsComputed,
        windowBlocks: Number.POSITIVE_INFINITY,
        states: 0,
        seed: draw.seed,
        form: undefined,
      };
    });
}

// Hundreds of cases each: the default limit is less than a busy machine may need.
vi.setConfig({ testTimeout: PROPERTY_TIMEOUT_MS });

const RUNS = Number(process.env["KV_PROPERTY_RUNS"] ?? (isLongRun ? 400 : 80));

const moveAny = (drawn: fc.Arbitrary<KindScene>, numRuns: number) =>
  fc.assert(
    fc.property(drawn, (scene) => void moveKinds(scene)),
    { numRuns },
  );

const ALL_ORDERS = ["LBHNC", "BLHNC", "LBNHC", "BLNHC"] as const;
const UNLIKE_BLOCKS = [
  [16, 16],
  [32, 16],
  [16, 32],
  [4, 16],
  [48, 32],
  [6, 4],
  [3, 2],
  [1, 3],
] as const;
const unlike = () =>
  scenes({ layouts: ALL_ORDERS, remoteLayouts: ALL_ORDERS, blocks: UNLIKE_BLOCKS });
const asked = (drawn: fc.Arbitrary<KindScene>, change: Partial<KindScene>) =>
  drawn.map((scene): KindScene => ({ ...scene, ...change }));
const TURNED = { conversions: ["hnd-to-nhd"] } as const;

test.each<[string, () => fc.Arbitrary<KindScene>, number]>([
  ["head-major caches: every TP pair, block ratio, padding, grouping and prefix hit", scenes, 1],
  [
    "MLA: reads one copy and notifies the other ranks",
    () => scenes({ mla: true, layouts: ["LBHNC", "LBNHC"] }),
    0.5,
  ],
  [
    "token-major caches: moves whole blocks for equal heads, and single tokens for a split by head",
    () => scenes({ layouts: ["LBNHC", "BLNHC"] }),
    0.5,
  ],
  [
    "the direct form: any block sizes and orders, with a receive pass only for the tail",
    () => asked(unlike(), { form: "direct" }),
    1,
  ],
  ["the form that the plan chooses", unlike, 0.5],
  ["the permute form when requested", () => asked(scenes(), { form: "permute" }), 0.25],
  [
    "MLA with any block sizes",
    () => scenes({ mla: true, layouts: ["LBHNC"], blocks: UNLIKE_BLOCKS }),
    0.25,
  ],
  [
    "head-major into token-major: the receive pass reorders, also across TP and block sizes",
    () =>
      asked(
        scenes({ layouts: ["LBNHC"], remoteLayouts: ["LBHNC"] }).filter(
          ({ groups }) => groups.length === 1,
        ),
        TURNED,
      ),
    0.5,
  ],
])("%s", (_name, drawn, part) => moveAny(drawn(), RUNS * part));

// The rules of tools/conformance/beyond.ts, each by a case of its own.
const scene = (change: {
  prefill?: Partial<KindEngine>;
  decode?: Partial<KindEngine>;
}): KindScene => {
  const shape = { tpSize: 1, kernelTokens: 16, perLogical: 1, logicalBlocks: 12 };
  return {
    groups: ["full"],
    caches: ["layer.0", "layer.1"].map((name) => ({ name, groups: [0], heads: 4 })),
    numKvHeads: 4,
    prefill: { ...shape, ...change.prefill },
    decode: { ...shape, ...change.decode },
    numTokens: 100,
    computedBlocks: 1,
    windowBlocks: 0,
    states: 0,
    seed: 4,
    form: undefined,
  };
};

test.each([1, 2, 4])("beyond: prefill TP 8 above 4 KV heads, decode TP %i", (tpSize) => {
  moveKinds(scene({ prefill: { tpSize: 8 }, decode: { tpSize } }));
});

test.each([
  [4, 1],
  [4, 2],
  [8, 2],
])(
  "beyond: prefill TP %i, decode TP %i, prefill blocks of 16 into blocks of 32",
  (prefillTp, decodeTp) => {
    moveKinds(
      scene({ prefill: { tpSize: prefillTp }, decode: { tpSize: decodeTp, kernelTokens: 32 } }),
    );
  },
);

test.each([
  [16, 32],
  [48, 32],
])("beyond: decode blocks of %i filled from prefill blocks of %i", (local, remote) => {
  moveKinds(scene({ prefill: { kernelTokens: remote }, decode: { kernelTokens: local } }));
});

test.each([
  ["LBHNC", "LBNHC"],
  ["LBNHC", "LBHNC"],
  ["BLHNC", "LBHNC"],
  ["BLNHC", "LBHNC"],
] as const)("beyond: a decode cache of %s filled from one of %s", (local, remote) => {
  moveKinds(scene({ prefill: { layout: remote, tpSize: 2 }, decode: { layout: local } }));
});

test("beyond: token-major blocks split by head", () => {
  moveKinds(scene({ prefill: { layout: "LBNHC" }, decode: { layout: "LBNHC", tpSize: 2 } }));
});
