import type { BlockIds, KvCacheKind } from "@kv/interface";
import { handshakeTargetRanks } from "@kv/topology";
import fc from "fast-check";
import { expect } from "vitest";
import {
  applyReceivePass,
  buildEngineTransferPlan,
  planRequest,
  type ReceiveConversion,
  type RegionGeometry,
  type RequestBlocks,
} from "../../src/index.js";
import { share } from "../share.js";
import {
  blockTokensOf,
  type CacheSpec,
  CELL,
  eachCell,
  groupKvHeadsOf,
  type KindEngine,
  type KindRank,
  kindEngine,
  moveAll,
  readCell,
  specOfGroup,
  writeCell,
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
  /** Of a prefix hit: of all groups, or of each. */
  readonly computedBlocks: number | readonly number[];
  /** False: the request does not say how many blocks a prefix hit supplies. */
  readonly tellsComputed?: boolean;
  readonly conversions?: readonly ReceiveConversion[];
  /** Number of blocks that a window keeps; P may have freed more of them. */
  readonly windowBlocks: number;
  readonly prefillWindowBlocks?: number;
  /** D's prefix cache has blocks of windows too. */
  readonly hitsWindows?: boolean;
  readonly masksUncovered?: boolean;
  readonly states: number;
  readonly seed: number;
}

interface Model {
  readonly groups: readonly KvCacheKind[];
  readonly caches: readonly CacheSpec[];
  readonly numKvHeads?: number;
  /** With more ranks a cell would be smaller than a label. */
  readonly mostRanks?: number;
  /**
   * States make the pages of attention longer. A block's length then does not give the bytes of a
   * token, so both engines have blocks of as many tokens.
   */
  readonly padsPages?: boolean;
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
    padsPages: true,
  },
  {
    groups: ["mla", "mamba"],
    caches: [layer(0, { groups: [0, 1], state: { projections: [8], recurrent: 8 } })],
    mostRanks: 2,
  },
  {
    // States in regions of their own, larger than a block of attention.
    groups: ["full", "mamba"],
    caches: [layer(0, { groups: [0], heads: 4 }), layer(1, { groups: [1], state })],
  },
  {
    groups: ["mla", "mamba"],
    caches: [layer(0, { groups: [0] }), layer(1, { groups: [1], state })],
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
    mostRanks: 2,
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
    const { groups, caches, numKvHeads = 4, mostRanks = 8, padsPages, allows = [] } = draw.model;
    const dealt = allows.includes("dcp") && (draw.prefill.dcp > 1 || draw.decode.dcp > 1);
    const sameTokens = draw.sameTokens || dealt || padsPages === true;
    const engine = (given: typeof draw.prefill, isPrefill: boolean): KindEngine => ({
      tpSize: Math.min(given.tpSize, mostRanks),
      kernelTokens: sameTokens ? draw.prefill.kernelTokens : given.kernelTokens,
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

/** The tables of the whole sequence, of both sides: fragmented, and never shared by groups. */
export function tablesOfKinds(scene: KindScene): { prefill: number[][]; decode: number[][] } {
  const tablesOf = (engine: KindEngine, seed: number) => {
    let next = 1;
    return scene.groups.map((kind, group) => {
      const logical = blockTokensOf(specOfGroup(scene.caches, group), engine);
      const all = Math.ceil(scene.numTokens / (logical * (engine.dcpSize ?? 1)));
      const count = kind === "mamba" || kind === "circular" ? scene.states : all;
      const begin = next;
      next += count + (seed % 3);
      const take = (step: number) =>
        Array.from({ length: count }, (_, index) => begin + ((index * step) % count));
      const ids = take(1 + (seed % 4));
      return new Set(ids).size === count ? ids : take(1).reverse();
    });
  };
  return {
    prefill: tablesOf(scene.prefill, scene.seed + 1),
    decode: tablesOf(scene.decode, scene.seed),
  };
}

const isWindow = (kind: KvCacheKind) => kind === "swa" || kind === "swa-mla";
const isSequence = (kind: KvCacheKind) => kind === "full" || kind === "mla";

/** Blocks of the group at the begin of a sequence that a prefix hit supplies. */
const computedOf = ({ computedBlocks }: KindScene, group: number) =>
  typeof computedBlocks === "number" ? computedBlocks : (computedBlocks[group] ?? 0);

/** The first block of a group that a side lists. */
function firstBlock(scene: KindScene, group: number, count: number, isDecode: boolean): number {
  const kind = scene.groups[group] ?? "";
  const { windowBlocks, prefillWindowBlocks = windowBlocks, hitsWindows = false } = scene;
  const hit = isDecode ? computedOf(scene, group) : 0;
  if (isSequence(kind)) return hit;
  if (!isWindow(kind)) return 0;
  const inWindow = Math.max(0, count - (isDecode ? windowBlocks : prefillWindowBlocks));
  return hitsWindows ? Math.max(inWindow, hit) : inWindow;
}

export function requestOfKinds(scene: KindScene): RequestBlocks {
  const { prefill, decode } = tablesOfKinds(scene);
  const listed = (tables: number[][], isDecode: boolean) =>
    tables.map((ids, group) => ids.slice(firstBlock(scene, group, ids.length, isDecode)));
  return {
    localBlockIds: listed(decode, true),
    remoteBlockIds: listed(prefill, false),
    numTokens: scene.numTokens,
    ...(scene.tellsComputed === false
      ? {}
      : { localComputedBlocks: scene.groups.map((_, group) => computedOf(scene, group)) }),
  };
}

/** The first token of each group that decode receives: after a prefix hit, or in both windows. */
function firstTokens(scene: KindScene): number[] {
  const { prefill, decode } = tablesOfKinds(scene);
  return scene.groups.map((kind, group) => {
    const tokens = (engine: KindEngine) =>
      blockTokensOf(specOfGroup(scene.caches, group), engine) * (engine.dcpSize ?? 1);
    const begin = (ids: readonly number[] = [], engine: KindEngine) =>
      firstBlock(scene, group, ids.length, engine === scene.decode) * tokens(engine);
    if (!isWindow(kind) && !isSequence(kind)) return 0;
    return Math.max(begin(prefill[group], scene.prefill), begin(decode[group], scene.decode));
  });
}

/** Both engines with their memory, and the plans of all decode ranks. Throws the planner's errors. */
export function buildKinds(scene: KindScene) {
  const { caches, groups, conversions, form, masksUncovered } = scene;
  const prefill = kindEngine(scene.prefill, caches, groups, 2 ** 40, 0xdd);
  const decode = kindEngine(scene.decode, caches, groups, 2 ** 36, FILLER);
  const remotes = prefill.map(({ geometry }) => geometry);
  const plans = decode.map(({ geometry: local }) => {
    const asked = handshakeTargetRanks({
      tpRank: local.tpRank,
      tpSize: local.tpSize,
      remoteTpSize: scene.prefill.tpSize,
      dcpSize: local.dcpSize ?? 1,
      remoteDcpSize: scene.prefill.dcpSize ?? 1,
    });
    return buildEngineTransferPlan({
      groups,
      numKvHeads: scene.numKvHeads,
      ...groupKvHeadsOf(caches, groups),
      local,
      remotes: remotes.filter(({ tpRank }) => asked.includes(tpRank)),
      prefixCaching: false,
      conversions,
      form,
      masksUncovered,
    });
  });
  return { prefill, decode, remotes, plans };
}

const FILLER = 0xee;

/**
 * Moves the bytes of a scene's request. Throws unless every cell of the request arrives, all other
 * bytes of its blocks are zero, no byte outside of them changes, and each prefill rank hears of it
 * as often as it awaits. Returns the plans, the requests, and the notifications by stage and rank.
 */
export function moveKinds(scene: KindScene) {
  const { prefill, decode, plans } = buildKinds(scene);
  const { groups, numTokens } = scene;
  const tables = tablesOfKinds(scene);
  for (const rank of prefill)
    eachCell(rank, groups, { numTokens, tables: tables.prefill }, writeCell);

  const blocks = requestOfKinds(scene);
  const told = new Map<string, number>();
  const made = plans.map((plan, index) => {
    const local = decode[index] as KindRank;
    const request = planRequest(plan, blocks);
    const read = request.reads.map(
      ({ remotePpRank, remoteRank }) => `${remotePpRank}.${remoteRank}`,
    );
    const notified = request.notify.map(({ ppRank, tpRank }) => `${ppRank}.${tpRank}`);
    for (const rank of [...new Set(read), ...notified]) told.set(rank, (told.get(rank) ?? 0) + 1);
    expect(moveAll(plan, request, local, prefill)).toBe(request.lengthBytes);
    if (request.receivePass !== undefined) applyReceivePass(plan, request.receivePass, local.bytes);
    return { plan, request };
  });
  for (const { geometry } of prefill)
    expect(told.get(`${geometry.ppRank}.${geometry.tpRank}`)).toBe(plans[0]?.localConsumers);

  const expected = kindEngine(scene.decode, scene.caches, groups, 2 ** 36, FILLER);
  const cells = { numTokens, tables: tables.decode, fromToken: firstTokens(scene) };
  for (const [index, rank] of expected.entries()) {
    const got = decode[index] as KindRank;
    eachBlock(rank, groups, blocks.localBlockIds, (region, from, to, isZeroed) => {
      const bytes = rank.bytes[region] as Uint8Array;
      if (isZeroed && plans[index]?.uncovered === "zeroed") bytes.fill(0, from, to);
      else bytes.set((got.bytes[region] as Uint8Array).subarray(from, to), from);
    });
    eachCell(rank, groups, cells, writeCell);
    for (const [region, bytes] of rank.bytes.entries()) {
      const other = got.bytes[region] as Uint8Array;
      const differs = bytes.findIndex((byte, at) => byte !== other[at]);
      if (differs < 0) continue;
      const [is, wanted] = [other, bytes].map((all) => readCell(all, differs - (differs % CELL)));
      expect.fail(
        `decode rank ${index}, region ${region}, byte ${differs}: label ${is}, expected ${wanted}`,
      );
    }
  }
  return { made, told };
}

/**
 * Every block of a request in every cache of a rank. What is no cell of the request is zeroed where
 * a block is heads and tokens alone.
 */
function eachBlock(
  { geometry, caches }: KindRank,
  groups: readonly KvCacheKind[],
  blockIds: BlockIds,
  visit: (region: number, from: number, to: number, isZeroed: boolean) => void,
): void {
  const per = geometry.physicalBlocksPerLogical;
  for (const [index, cache] of caches.entries()) {
    const page = geometry.packedMembers?.[cache.name];
    const at = page === undefined ? index : 0;
    const region = geometry.regions[at] as RegionGeometry;
    for (const group of cache.groups) {
      const kind = groups[group] ?? "";
      const isPlain = cache.state === undefined && cache.of === undefined && kind !== "circular";
      for (const id of blockIds[group] ?? []) {
        for (let block = id * per; block < (id + 1) * per; block++) {
          const from = block * region.blockStrideBytes + (page?.offsetBytes ?? 0);
          const lengthBytes =
            kind === "mamba"
              ? region.blockStrideBytes
              : (page?.lengthBytes ?? region.blockLengthBytes);
          visit(at, from, from + lengthBytes, isPlain);
        }
      }
    }
  }
}
