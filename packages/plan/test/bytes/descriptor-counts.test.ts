import type { KvCacheKind } from "@kv/interface";
import { handshakeTargetRanks } from "@kv/topology";
import fc from "fast-check";
import { expect, test } from "vitest";
import { computeDescriptorIds } from "../../../../tools/conformance/vllm-descriptor-ids.js";
import {
  buildEngineTransferPlan,
  type EngineTransferPlan,
  planRequest,
  type RankGeometry,
  type TransferList,
} from "../../src/index.js";
import { mergedDescriptorCount } from "../../src/prove/descriptors.js";
import { PROPERTY_TIMEOUT_MS } from "../property-timeout.js";
import { type CacheSpec, type KindEngine, kindEngine } from "./kind-memory.js";

interface Model {
  readonly groups: readonly KvCacheKind[];
  readonly caches: readonly CacheSpec[];
}

const layer = (index: number, spec: Omit<CacheSpec, "name">): CacheSpec => ({
  name: `layer.${index}`,
  ...spec,
});
const HEADS = 4;
const PROJECTIONS = [128, 64, 64];

/** Cache kinds that vLLM reads too. */
const ATTENTION: readonly Model[] = [
  { groups: ["full"], caches: [0, 1].map((index) => layer(index, { groups: [0], heads: HEADS })) },
  { groups: ["mla"], caches: [0, 1].map((index) => layer(index, { groups: [0] })) },
  {
    groups: ["full", "swa"],
    caches: [layer(0, { groups: [0], heads: HEADS }), layer(1, { groups: [1], heads: HEADS })],
  },
  { groups: ["full", "full"], caches: [layer(0, { groups: [0, 1], heads: HEADS })] },
];
const HYBRID: Model = {
  groups: ["full", "mamba"],
  caches: [0, 1].map((index) =>
    layer(index, {
      groups: [0, 1],
      heads: HEADS,
      state: { projections: PROJECTIONS, recurrent: 256 },
    }),
  ),
};

type Pool = "consecutive" | "fragmented" | "scattered";

interface Draw {
  readonly model: Model;
  readonly tp: readonly [prefill: number, decode: number];
  /** Tokens of P's blocks; D's are `ratio` times as large. */
  readonly tokens: number;
  readonly ratio: number;
  /** Multiplies the bytes of a cell: large pieces must not be cut either. */
  readonly scale: number;
  readonly pool: Pool;
  readonly numTokens: number;
  readonly computedBlocks: number;
}

const WINDOW_BLOCKS = 6;
const STRETCH = 4;

const draw = (models: readonly Model[], ratios: readonly number[]): fc.Arbitrary<Draw> =>
  fc.record({
    model: fc.constantFrom(...models),
    tp: fc.tuple(fc.constantFrom(1, 2, 4, 8), fc.constantFrom(1, 2, 4, 8)),
    tokens: fc.constantFrom(4, 8),
    ratio: fc.constantFrom(...ratios),
    scale: fc.constantFrom(1, 4096),
    pool: fc.constantFrom("consecutive" as const, "fragmented" as const, "scattered" as const),
    numTokens: fc.integer({ min: 1, max: 260 }),
    computedBlocks: fc.constantFrom(0, 0, 1, 3),
  });

/** Ids from a first one on: consecutive, in runs of four, or with a gap after each. */
function take(pool: Pool, first: number, count: number): number[] {
  const gap = { consecutive: Number.POSITIVE_INFINITY, fragmented: STRETCH, scattered: 1 }[pool];
  return Array.from({ length: count }, (_, index) => first + index + Math.floor(index / gap));
}

/**
 * Blocks of both sides, and those of P's that vLLM would read: after D's prefix hit, or in D's
 * window.
 */
function blocksOf({ model, tokens, ratio, pool, numTokens, computedBlocks }: Draw) {
  const [theirs, ours] = [Math.ceil(numTokens / tokens), Math.ceil(numTokens / (tokens * ratio))];
  const kinds = model.groups.map((kind, group) => {
    const at = 1 + group * 150;
    if (kind === "mamba") return { remote: [at], local: [at], computed: 0, read: [at] };
    const remote = take(pool, at, theirs);
    const local = take(pool, at + 1, ours);
    const left =
      kind === "swa" ? Math.max(0, ours - WINDOW_BLOCKS) : Math.min(computedBlocks, ours - 1);
    const read = remote.slice(left * ratio);
    return kind === "swa"
      ? { remote: read, local: local.slice(left), computed: 0, read }
      : { remote, local: local.slice(left), computed: left, read };
  });
  return {
    request: {
      numTokens,
      localBlockIds: kinds.map(({ local }) => local),
      remoteBlockIds: kinds.map(({ remote }) => remote),
      localComputedBlocks: kinds.map(({ computed }) => computed),
    },
    readByVllm: kinds.map(({ read }) => read),
  };
}

function enlarged(rank: RankGeometry, scale: number): RankGeometry {
  const regions = rank.regions.map((region) => ({
    ...region,
    baseAddress: region.baseAddress * scale,
    blockLengthBytes: region.blockLengthBytes * scale,
    blockStrideBytes: region.blockStrideBytes * scale,
  }));
  return { ...rank, regions };
}

function plansOf({ model, tp, tokens, ratio, scale }: Draw): readonly EngineTransferPlan[] {
  const { groups, caches } = model;
  const ranks = (side: 0 | 1, kernelTokens: number, base: number): RankGeometry[] => {
    const engine: KindEngine = {
      tpSize: tp[side],
      kernelTokens,
      perLogical: 1,
      logicalBlocks: 310,
    };
    return kindEngine(engine, caches, groups, base, 0).map(({ geometry }) =>
      enlarged(geometry, scale),
    );
  };
  const remotes = ranks(0, tokens, 2 ** 40);
  return ranks(1, tokens * ratio, 2 ** 36).map((local) => {
    const asked = handshakeTargetRanks({
      tpRank: local.tpRank,
      tpSize: tp[1],
      remoteTpSize: tp[0],
    });
    return buildEngineTransferPlan({
      groups,
      local,
      numKvHeads: HEADS,
      prefixCaching: false,
      remotes: remotes.filter(({ tpRank }) => asked.includes(tpRank)),
    });
  });
}

/**
 * vLLM's descriptors of a request: blocks times regions, for each rank that it reads. The
 * `desc_ids` vectors record this count.
 */
function countOfVllm(plan: EngineTransferPlan, blockIds: readonly (readonly number[])[]): number {
  const { regions } = plan.remote;
  return plan.sources.reduce((sum, source) => {
    const ids = computeDescriptorIds({
      groups: plan.groupPlans.map(({ kind }) => kind),
      blockIds: blockIds.map((ids, group) => (source.groups.includes(group) ? ids : [])),
      numRegions: regions.length,
      numBlocks: 310,
      regionGroupIds: regions.map(({ groupId }) => groupId),
      stateSpace: { convProjections: PROJECTIONS.length },
    });
    return sum + ids.length;
  }, 0);
}

function compare(
  drawn: Draw,
  check: (counts: { ours: number; merged: number; vllm: number }) => void,
): void {
  const { request, readByVllm } = blocksOf(drawn);
  for (const plan of plansOf(drawn)) {
    const planned = planRequest(plan, request);
    check({
      ours: planned.descriptorCount,
      merged: planned.reads.reduce((sum, read) => {
        const list = plan.sources[read.sourceIndex]?.lists[read.listIndex] as TransferList;
        return sum + mergedDescriptorCount(read, list);
      }, 0),
      vllm: countOfVllm(plan, readByVllm),
    });
  }
}

test(
  "never needs more descriptors than vLLM for the same blocks, for all block and TP sizes",
  () => {
    fc.assert(
      fc.property(draw([...ATTENTION, HYBRID], [1, 2, 4]), (drawn) => {
        compare(drawn, ({ ours, merged, vllm }) => {
          expect(ours).toBeLessThanOrEqual(vllm);
          expect(merged).toBeLessThanOrEqual(ours);
        });
      }),
    );
  },
  PROPERTY_TIMEOUT_MS,
);

test(
  "merging leaves at most half of vLLM's descriptors when whole blocks come in runs",
  () => {
    const paired = draw(ATTENTION, [1, 2, 4]).map(
      (drawn): Draw => ({
        ...drawn,
        tp: [drawn.tp[0], drawn.tp[0]],
        pool: drawn.pool === "scattered" ? "fragmented" : drawn.pool,
        computedBlocks: 0,
      }),
    );
    fc.assert(
      fc.property(paired, (drawn) => {
        fc.pre(drawn.numTokens > drawn.tokens * drawn.ratio);
        compare(drawn, ({ merged, vllm }) => expect(merged).toBeLessThanOrEqual(vllm / 2));
      }),
    );
  },
  PROPERTY_TIMEOUT_MS,
);
