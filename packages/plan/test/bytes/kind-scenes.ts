import type { KvCacheKind } from "@kv/interface";
import { handshakeTargetRanks } from "@kv/topology";
import fc from "fast-check";
import {
  buildEngineTransferPlan,
  type EngineTransferPlan,
  type RankGeometry,
  type RequestBlocks,
} from "../../src/index.js";
import { share } from "../share.js";
import {
  blockTokensOf,
  type CacheSpec,
  groupKvHeadsOf,
  type KindEngine,
  kindEngine,
  specOfGroup,
} from "./kind-memory.js";

/**
 * A model with caches of several kinds, or with one whose cells have no heads and tokens; two
 * engines; one request.
 */
export interface KindScene {
  readonly groups: readonly KvCacheKind[];
  readonly caches: readonly CacheSpec[];
  readonly numKvHeads: number;
  readonly prefill: KindEngine;
  readonly decode: KindEngine;
  readonly form: "permute" | "direct" | undefined;
  readonly numTokens: number;
  readonly computedBlocks: number;
  /** Number of blocks that a window keeps. */
  readonly windowBlocks: number;
  readonly states: number;
  readonly seed: number;
}

interface Model {
  readonly groups: readonly KvCacheKind[];
  readonly caches: readonly CacheSpec[];
  readonly numKvHeads?: number;
  /** Optional abilities of the engines. */
  readonly allows?: readonly ("dcp" | "stages" | "packed")[];
}

const layer = (index: number, spec: Omit<CacheSpec, "name">): CacheSpec => ({
  name: `layer.${index}`,
  ...spec,
});
const state = { projections: [128, 64, 64], recurrent: 256 };

const MODELS: readonly Model[] = [
  {
    groups: ["full", "mamba"],
    caches: [0, 1].map((index) => layer(index, { groups: [0, 1], heads: 4, state })),
    allows: ["stages"],
  },
  {
    groups: ["full", "mamba", "mamba"],
    caches: [
      layer(0, { groups: [0, 1, 2], heads: 2, state: { projections: [128], recurrent: 64 } }),
    ],
    numKvHeads: 2,
  },
  {
    groups: ["mla", "mamba"],
    caches: [layer(0, { groups: [0, 1], state: { projections: [64], recurrent: 64 } })],
  },
  {
    groups: ["mla"],
    caches: [0, 1].map((index) => layer(index, { groups: [0] })),
    allows: ["dcp", "stages", "packed"],
  },
  {
    groups: ["mla", "full"],
    caches: [layer(0, { groups: [0] }), layer(1, { groups: [1], heads: 4 })],
    allows: ["stages"],
  },
  {
    groups: ["mla", "swa-mla"],
    caches: [layer(0, { groups: [0] }), layer(1, { groups: [1] })],
    allows: ["stages", "packed"],
  },
  { groups: ["mla", "circular"], caches: [layer(0, { groups: [0] }), layer(1, { groups: [1] })] },
  {
    groups: ["full", "swa"],
    caches: [
      layer(0, { groups: [0], heads: 4 }),
      layer(1, { groups: [1], heads: 2, blockTokens: 16 }),
    ],
    allows: ["stages"],
  },
  {
    // As Gemma 4: the layers with fewer heads have blocks of more tokens.
    groups: ["full", "swa"],
    caches: [
      layer(0, { groups: [0], heads: 4, blockTimes: 2 }),
      layer(1, { groups: [1], heads: 8 }),
    ],
    numKvHeads: 8,
    allows: ["stages"],
  },
  {
    // Groups that differ in heads, in one pool: cells of other bytes, or blocks of more tokens.
    groups: ["full", "swa"],
    caches: [0, 1].map((index) =>
      layer(index, { groups: [0, 1], heads: 8, of: { 0: { heads: 2 } } }),
    ),
    numKvHeads: 8,
  },
  {
    groups: ["full", "swa"],
    caches: [layer(0, { groups: [0, 1], heads: 8, of: { 1: { heads: 2, blockTimes: 4 } } })],
    numKvHeads: 8,
  },
  {
    groups: ["full"],
    caches: [0, 1].map((index) => layer(index, { groups: [0], heads: 4 })),
    allows: ["stages"],
  },
  {
    groups: ["full"],
    caches: [
      layer(0, { groups: [0], heads: 4 }),
      layer(1, { groups: [0], heads: 4, memoryType: "VRAM" }),
    ],
  },
  {
    groups: ["full", "full", "swa"],
    caches: [layer(0, { groups: [0, 1], heads: 8 }), layer(1, { groups: [2], heads: 8 })],
    numKvHeads: 8,
    allows: ["stages"],
  },
];

const engineDraw = fc.record({
  tpSize: fc.constantFrom(1, 2, 4, 8),
  kernelTokens: fc.constantFrom(4, 8, 8, 16),
  perLogical: fc.constantFrom(1, 1, 2, 3),
  layout: fc.constantFrom("LBHNC" as const, "LBHNC" as const, "LBNHC" as const),
  padding: fc.constantFrom(0, 0, 12),
  dcp: fc.constantFrom(1, 1, 2, 4, 8),
  staged: fc.boolean(),
  packed: fc.boolean(),
});

export const kindScene: fc.Arbitrary<KindScene> = fc
  .record({
    model: fc.constantFrom(...MODELS),
    prefill: engineDraw,
    decode: engineDraw,
    sameTokens: fc.boolean(),
    form: fc.constantFrom(undefined, undefined, "permute" as const, "direct" as const),
    numTokens: fc.integer({ min: 1, max: 130 }),
    computedShare: share.map((part) => 0.9 * part),
    windowBlocks: fc.integer({ min: 1, max: 4 }),
    states: fc.constantFrom(1, 1, 2),
    seed: fc.nat({ max: 100_000 }),
  })
  .map((draw): KindScene => {
    const { groups, caches, numKvHeads = 4, allows = [] } = draw.model;
    const dealt = allows.includes("dcp") && (draw.prefill.dcp > 1 || draw.decode.dcp > 1);
    const engine = (given: typeof draw.prefill, isPrefill: boolean): KindEngine => ({
      tpSize: given.tpSize,
      kernelTokens: draw.sameTokens || dealt ? draw.prefill.kernelTokens : given.kernelTokens,
      // Blocks that are dealt out to a DCP group are cut alike on both sides.
      perLogical: dealt ? 1 : given.perLogical,
      layout: given.layout,
      logicalBlocks: 150,
      padding: given.packed ? 0 : given.padding,
      ...(allows.includes("dcp") && given.dcp > 1
        ? { dcpSize: Math.min(given.dcp, given.tpSize) }
        : {}),
      ...(allows.includes("stages") && isPrefill && given.staged ? { stages: [[0], [1]] } : {}),
      ...(allows.includes("packed") && isPrefill && given.packed && !given.staged
        ? { packed: true }
        : {}),
    });
    const decode = engine(draw.decode, false);
    const blocks = Math.ceil(
      draw.numTokens / (decode.kernelTokens * decode.perLogical * (decode.dcpSize ?? 1)),
    );
    return {
      groups,
      caches,
      numKvHeads,
      prefill: engine(draw.prefill, true),
      decode,
      form: draw.form,
      numTokens: draw.numTokens,
      computedBlocks: Math.floor(blocks * draw.computedShare),
      windowBlocks: draw.windowBlocks,
      states: draw.states,
      seed: draw.seed,
    };
  });

function tablesOf(scene: KindScene, engine: KindEngine, seed: number): number[][] {
  let next = 1;
  return scene.groups.map((kind, group) => {
    const logical = blockTokensOf(specOfGroup(scene.caches, group), engine);
    const all = Math.ceil(scene.numTokens / (logical * (engine.dcpSize ?? 1)));
    const tokenless = kind === "mamba" || kind === "circular";
    const windowed = kind === "swa" || kind === "swa-mla";
    const count = tokenless ? scene.states : windowed ? Math.min(all, scene.windowBlocks) : all;
    const ids = Array.from({ length: count }, (_, index) => next + index);
    next += count + (seed % 3);
    return seed % 2 === 0 ? ids : ids.reverse();
  });
}

export function requestOfKinds(scene: KindScene): RequestBlocks {
  const local = tablesOf(scene, scene.decode, scene.seed);
  return {
    localBlockIds: local.map((ids, group) => {
      const kind = scene.groups[group];
      return kind === "full" || kind === "mla" ? ids.slice(scene.computedBlocks) : ids;
    }),
    remoteBlockIds: tablesOf(scene, scene.prefill, scene.seed + 1),
    numTokens: scene.numTokens,
    localComputedBlocks: scene.groups.map(() => scene.computedBlocks),
  };
}

/** The plans of all decode ranks. Throws the planner's errors. */
export function buildKinds(scene: KindScene): {
  readonly remotes: readonly RankGeometry[];
  readonly plans: readonly EngineTransferPlan[];
} {
  const { caches, groups } = scene;
  const geometries = (engine: KindEngine, base: number) =>
    kindEngine(engine, caches, groups, base, 0).map(({ geometry }) => geometry);
  const [remotes, locals] = [geometries(scene.prefill, 2 ** 40), geometries(scene.decode, 2 ** 36)];
  const plans = locals.map((local) => {
    const [other] = remotes as [RankGeometry];
    const asked = handshakeTargetRanks({
      tpRank: local.tpRank,
      tpSize: local.tpSize,
      remoteTpSize: other.tpSize,
      dcpSize: local.dcpSize ?? 1,
      remoteDcpSize: other.dcpSize ?? 1,
    });
    return buildEngineTransferPlan({
      groups,
      numKvHeads: scene.numKvHeads,
      ...groupKvHeadsOf(caches, groups),
      local,
      remotes: remotes.filter(({ tpRank }) => asked.includes(tpRank)),
      prefixCaching: false,
      ...(scene.form === undefined ? {} : { form: scene.form }),
    });
  });
  return { remotes, plans };
}
