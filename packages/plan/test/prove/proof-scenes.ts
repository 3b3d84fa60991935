import type { KvCacheKind, KvCacheLayout } from "@kv/interface";
import { handshakeTargetRanks } from "@kv/topology";
import fc from "fast-check";
import {
  buildEngineTransferPlan,
  type EngineTransferPlan,
  type RankGeometry,
  type RequestBlocks,
} from "../../src/index.js";
import { share } from "../share.js";

/** One engine of a pair; it defines the geometry of all its ranks. */
export interface EngineDraw {
  readonly tpSize: number;
  /** Ranks that share a sequence by decode context parallelism. */
  readonly dcpSize: number;
  readonly kernelBlockSize: number;
  readonly physicalBlocksPerLogical: number;
  readonly layout: KvCacheLayout;
  readonly attentionBackend: string;
  readonly paddingBytes: number;
  readonly numLogicalBlocks: number;
}

/** A pair of engines and one request. */
export interface Scene {
  readonly numKvHeads: number;
  readonly headBytes: number;
  readonly groups: readonly KvCacheKind[];
  /** Group of each region; -1 shared. */
  readonly regionGroups: readonly number[];
  /** Tokens in a block of each group, in the engine's. */
  readonly blockTimes: readonly number[];
  readonly prefill: EngineDraw;
  readonly decode: EngineDraw;
  readonly masksUncovered: boolean;
  readonly conversions: readonly ("hnd-to-nhd" | "attention-order")[];
  readonly numTokens: number;
  /** A prefix hit, of each group: they may differ. */
  readonly computedBlocks: readonly number[];
  /** Pipeline stages of a P that pushes: each has a plan for its layers alone. */
  readonly stages: number;
  readonly tellsComputed: boolean;
  /** The share of a window's blocks that the prefill side has freed. */
  readonly letGo: number;
  readonly seed: number;
}

/** Tokens in a logical block of the engine's tables: on all ranks that share a sequence. */
export const logicalTokens = (engine: EngineDraw) =>
  engine.kernelBlockSize * engine.physicalBlocksPerLogical * engine.dcpSize;

export function ranksOf(scene: Scene, engine: EngineDraw, firstAddress: number): RankGeometry[] {
  const heads = scene.groups.includes("mla") ? 1 : Math.max(1, scene.numKvHeads / engine.tpSize);
  const lengthOf = (groupId: number) =>
    heads * engine.kernelBlockSize * (scene.blockTimes[groupId] ?? 1) * scene.headBytes;
  const differ = scene.blockTimes.some((times) => times !== 1);
  const numBlocks = engine.numLogicalBlocks * engine.physicalBlocksPerLogical;
  return Array.from({ length: engine.tpSize }, (_, tpRank) => ({
    tpRank,
    tpSize: engine.tpSize,
    dcpSize: engine.dcpSize,
    kernelBlockSize: engine.kernelBlockSize,
    physicalBlocksPerLogical: engine.physicalBlocksPerLogical,
    layout: engine.layout,
    attentionBackend: engine.attentionBackend,
    deviceId: tpRank,
    ...(differ
      ? {
          groupBlockTokens: scene.blockTimes.map(
            (times) => (times * logicalTokens(engine)) / engine.dcpSize,
          ),
        }
      : {}),
    regions: scene.regionGroups.map((groupId, index) => ({
      name: `layer.${index}`,
      baseAddress: firstAddress + (tpRank * 64 + index) * 2 ** 28,
      numBlocks,
      blockLengthBytes: lengthOf(groupId),
      blockStrideBytes: lengthOf(groupId) + engine.paddingBytes,
      groupId,
      memoryType: "DRAM" as const,
    })),
  }));
}

/** A pool in an order that has runs and gaps. */
function pool(count: number, seed: number): number[] {
  const ids = Array.from({ length: count }, (_, index) => index);
  if (seed % 3 === 0) return ids;
  let state = seed >>> 0;
  for (let index = count - 1; index > 0; index--) {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    if (seed % 3 === 1 && state % 4 !== 0) continue;
    const other = state % (index + 1);
    [ids[index], ids[other]] = [ids[other] as number, ids[index] as number];
  }
  return ids;
}

export function tables(scene: Scene, engine: EngineDraw, seed: number): number[][] {
  const most = Math.ceil(scene.numTokens / logicalTokens(engine));
  const ids = pool(engine.numLogicalBlocks, seed);
  return scene.groups.map((_, group) => {
    const each = Math.ceil(
      scene.numTokens / (logicalTokens(engine) * (scene.blockTimes[group] ?? 1)),
    );
    return ids.slice(group * most, group * most + each);
  });
}

export function sampleRequest(scene: Scene): RequestBlocks {
  const decode = tables(scene, scene.decode, scene.seed + 1);
  const computed = scene.groups.map((_, group) =>
    Math.floor((scene.computedBlocks[group] ?? 0) / (scene.blockTimes[group] ?? 1)),
  );
  return {
    localBlockIds: decode.map((table, group) => table.slice(computed[group])),
    remoteBlockIds: tables(scene, scene.prefill, scene.seed).map((table, group) =>
      scene.groups[group] === "swa" ? table.slice(Math.floor(scene.letGo * table.length)) : table,
    ),
    numTokens: scene.numTokens,
    ...(scene.tellsComputed ? { localComputedBlocks: computed } : {}),
  };
}

export interface BuiltScene {
  readonly prefill: readonly RankGeometry[];
  readonly plans: readonly EngineTransferPlan[];
}

/** The plans of all decode ranks. Throws the planner's errors. */
export function build(scene: Scene): BuiltScene {
  const prefill = ranksOf(scene, scene.prefill, 2 ** 44);
  const decode = ranksOf(scene, scene.decode, 2 ** 40);
  const plans = decode.map((local) =>
    buildEngineTransferPlan({
      local,
      remotes: handshakeTargetRanks({
        tpRank: local.tpRank,
        tpSize: scene.decode.tpSize,
        remoteTpSize: scene.prefill.tpSize,
        dcpSize: scene.decode.dcpSize,
        remoteDcpSize: scene.prefill.dcpSize,
      }).map((rank) => prefill[rank] as RankGeometry),
      numKvHeads: scene.numKvHeads,
      groups: scene.groups,
      conversions: scene.conversions,
      masksUncovered: scene.masksUncovered,
    }),
  );
  return { prefill, plans };
}

const divide = (one: number, other: number) => one % other === 0 || other % one === 0;

const GROUPINGS: readonly {
  groups: readonly KvCacheKind[];
  regions: readonly number[];
  times?: readonly number[];
}[] = [
  { groups: ["full"], regions: [0] },
  { groups: ["full"], regions: [0, 0, 0] },
  { groups: ["full", "full"], regions: [0, 1] },
  { groups: ["full", "swa"], regions: [0, 0] },
  { groups: ["swa", "full"], regions: [0, 1, 1] },
  { groups: ["full", "swa"], regions: [-1, -1] },
  { groups: ["full", "full"], regions: [0, -1, 1] },
  { groups: ["full", "full"], regions: [0, 1], times: [2, 1] },
  { groups: ["swa", "full"], regions: [0, 1, 1], times: [1, 3] },
  { groups: ["mla"], regions: [0, 0] },
  { groups: ["swa"], regions: [0, 0] },
];

/** All pairs that the planner must accept or refuse, including sizes that do not divide. */
export const anyScene: fc.Arbitrary<Scene> = fc
  .record({
    tp: fc.tuple(fc.constantFrom(1, 2, 3, 4, 6, 8, 16), fc.constantFrom(1, 2, 3, 4, 6, 8, 16)),
    numKvHeads: fc.constantFrom(1, 2, 3, 4, 6, 8, 12, 16),
    headBytes: fc.constantFrom(2, 4, 6, 256),
    grouping: fc.constantFrom(...GROUPINGS),
    layouts: fc.constantFrom(
      ...([
        ["LBHNC", "LBHNC"],
        ["LBHNC", "LBHNC"],
        ["LBHNC", "LBHNC"],
        ["BLHNC", "BLHNC"],
        ["LBNHC", "LBNHC"],
        ["BLNHC", "BLNHC"],
        ["LHBNC", "LHBNC"],
        ["BHLNC", "BHLNC"],
        ["LBHNC", "LBNHC"],
        ["LBNHC", "LBHNC"],
      ] as const),
    ),
    backends: fc.constantFrom(
      ...([
        ["FLASH_ATTN", "FLASH_ATTN"],
        ["FLASH_ATTN", "FLASH_ATTN"],
        ["FLASH_ATTN", "FLASH_ATTN"],
        ["CPU_ATTN", "CPU_ATTN"],
        ["PLAIN", "CPU_ATTN"],
        ["PLAIN", "FLASH_ATTN"],
      ] as const),
    ),
    blocks: fc.tuple(fc.constantFrom(1, 2, 4, 16), fc.constantFrom(1, 1, 1, 2, 3, 4, 0.5, 1.5)),
    physical: fc.tuple(fc.constantFrom(1, 1, 2, 3), fc.constantFrom(1, 1, 2, 3)),
    padding: fc.tuple(fc.constantFrom(0, 0, 12), fc.constantFrom(0, 0, 20)),
    masksUncovered: fc.boolean(),
    converts: fc.boolean(),
    tokenShare: share,
    computedShares: fc.tuple(share, share),
    differs: fc.boolean(),
    dcp: fc.tuple(fc.constantFrom(1, 1, 2, 4), fc.constantFrom(1, 1, 2, 4)),
    stages: fc.constantFrom(1, 1, 2, 3),
    tellsComputed: fc.boolean(),
    letGo: fc.oneof(
      fc.constant(0),
      share.map((part) => 0.99 * part),
    ),
    seed: fc.nat({ max: 1_000_000 }),
  })
  .filter(({ blocks: [size, ratio] }) => Number.isInteger(size * ratio))
  .map((draw): Scene => {
    const { groups, regions, times = groups.map(() => 1) } = draw.grouping;
    const [size, ratio] = draw.blocks;
    const engine = (side: 0 | 1): EngineDraw => ({
      tpSize: draw.tp[side],
      dcpSize: groups.includes("mla") ? draw.dcp[side] : 1,
      kernelBlockSize: side === 0 ? size : size * ratio,
      physicalBlocksPerLogical: draw.physical[side],
      layout: draw.layouts[side],
      // Layouts can be converted only when the order within a head is plain.
      attentionBackend: draw.layouts[0] === draw.layouts[1] ? draw.backends[side] : "FLASH_ATTN",
      paddingBytes: draw.padding[side],
      numLogicalBlocks: 0,
    });
    const [prefill, decode] = [engine(0), engine(1)];
    const most = Math.min(240, 6 * Math.max(logicalTokens(prefill), logicalTokens(decode)));
    const numTokens = 1 + Math.floor(draw.tokenShare * most);
    const sized = (side: EngineDraw): EngineDraw => ({
      ...side,
      numLogicalBlocks: (Math.ceil(numTokens / logicalTokens(side)) + 2) * groups.length,
    });
    const needed = Math.ceil(numTokens / logicalTokens(decode));
    return {
      numKvHeads: draw.numKvHeads,
      headBytes: draw.headBytes,
      groups,
      regionGroups: regions,
      blockTimes: times,
      prefill: sized(prefill),
      decode: sized(decode),
      masksUncovered: draw.masksUncovered,
      conversions: draw.converts ? ["hnd-to-nhd", "attention-order"] : [],
      numTokens,
      computedBlocks: groups.map((_, group) =>
        Math.floor((draw.computedShares[draw.differs ? group : 0] ?? 0) * needed * 0.99),
      ),
      stages: draw.stages,
      tellsComputed: draw.tellsComputed,
      letGo: draw.letGo,
      seed: draw.seed,
    };
  });

/** Scenes whose sizes divide: most of them are accepted. */
export const likelyScene = anyScene.filter(
  ({ prefill, decode, numKvHeads, groups }) =>
    divide(prefill.tpSize, decode.tpSize) &&
    divide(prefill.dcpSize, decode.dcpSize) &&
    prefill.tpSize % prefill.dcpSize === 0 &&
    decode.tpSize % decode.dcpSize === 0 &&
    (groups.includes("mla") ||
      (divide(prefill.tpSize, numKvHeads) && divide(decode.tpSize, numKvHeads))) &&
    decode.kernelBlockSize % prefill.kernelBlockSize === 0,
);

/**
 * What each stage of a P that pushes plans and writes: the scene with the stage's layers alone.
 * Groups without a layer there have no blocks; the stages' layers together are all of them.
 */
export function stagesOf(scene: Scene): readonly Scene[] {
  const { regionGroups, groups } = scene;
  const each = Math.ceil(regionGroups.length / scene.stages);
  return Array.from({ length: Math.ceil(regionGroups.length / each) }, (_, stage) => {
    const own = regionGroups.slice(stage * each, (stage + 1) * each);
    const named = [...groups.keys()].filter((group) => own.includes(group) || own.includes(-1));
    return {
      ...scene,
      groups: named.map((group) => groups[group] as KvCacheKind),
      blockTimes: named.map((group) => scene.blockTimes[group] ?? 1),
      computedBlocks: named.map((group) => scene.computedBlocks[group] ?? 0),
      regionGroups: own.map((group) => (group === -1 ? -1 : named.indexOf(group))),
    };
  });
}
