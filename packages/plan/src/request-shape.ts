import { KvError } from "@kv/interface";
import type { EngineTransferPlan, RegionIndexing } from "./engine-plan-types.js";
import type { RankGeometry } from "./geometry.js";

/** Neighbouring regions whose blocks step alike: their descriptor ids are expanded in one go. */
export interface RegionSpan {
  readonly blockStep: number;
  readonly partStep: number;
  readonly offsets: Int32Array;
}

/** Groups that live in the same regions, handled as one list. */
export interface BatchShape {
  readonly regionCount: number;
  /** Bytes of one part of a local block in all regions. */
  readonly partBytes: number;
  readonly localSpans: readonly RegionSpan[];
  readonly remoteSpans: readonly RegionSpan[];
}

export interface GroupShape {
  /** Logical blocks that every region of the group has. */
  readonly localBlocks: number;
  readonly remoteBlocks: number;
  /** Undefined for a group without a region. */
  readonly batch: BatchShape | undefined;
}

const shapes = new WeakMap<EngineTransferPlan, readonly GroupShape[]>();

/**
 * What every request asks of a plan's regions, a few numbers instead of hundreds of objects: a worker plans a request once in many
 * milliseconds, with cold caches, and then it is the number of objects that it pays for.
 */
export function requestShape(plan: EngineTransferPlan): readonly GroupShape[] {
  const known = shapes.get(plan);
  if (known !== undefined) return known;
  const batches = new Map<string, BatchShape>();
  const made = plan.regionsOfGroup.map((regions) => {
    const key = regions.join();
    const batch = batches.get(key) ?? batchOf(plan, regions);
    batches.set(key, batch);
    return {
      localBlocks: fewestBlocks(plan.local, regions),
      remoteBlocks: fewestBlocks(plan.remote, regions),
      batch: regions.length === 0 ? undefined : batch,
    };
  });
  shapes.set(plan, made);
  return made;
}

function batchOf(plan: EngineTransferPlan, regions: readonly number[]): BatchShape {
  const bytes = regions.reduce((sum, region) => sum + (plan.local.regions[region]?.blockLengthBytes ?? 0), 0);
  return {
    regionCount: regions.length,
    partBytes: bytes / plan.blockSizeRatio,
    localSpans: spansOf(plan.localIndexing, regions),
    remoteSpans: spansOf(plan.remoteIndexing, regions),
  };
}

function spansOf(indexing: readonly RegionIndexing[], regions: readonly number[]): readonly RegionSpan[] {
  const spans: { blockStep: number; partStep: number; offsets: number[] }[] = [];
  for (const region of regions) {
    const found = indexing[region];
    if (found === undefined) throw new KvError("KV_INTERNAL", `region ${region} is not in the plan`);
    const { blockStep, partStep, offset } = found;
    const last = spans.at(-1);
    if (last?.blockStep === blockStep && last.partStep === partStep) last.offsets.push(offset);
    else spans.push({ blockStep, partStep, offsets: [offset] });
  }
  return spans.map(({ offsets, ...steps }) => ({ ...steps, offsets: Int32Array.from(offsets) }));
}

function fewestBlocks(rank: RankGeometry, regions: readonly number[]): number {
  const fewest = regions.reduce(
    (least, region) => Math.min(least, rank.regions[region]?.numBlocks ?? 0),
    Number.POSITIVE_INFINITY,
  );
  return Math.floor(fewest / rank.physicalBlocksPerLogical);
}
