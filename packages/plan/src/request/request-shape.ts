import type { RegionIndexing } from "../engine/descriptor-tables.js";
import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { SourcePlan } from "../engine/source-plans.js";

/** Neighbouring segments with equal steps: their descriptor ids are expanded together. */
export interface RegionSpan {
  readonly blockStep: number;
  readonly partStep: number;
  readonly offsets: Int32Array;
}

/** The segments of one batch that one read moves. */
export interface BatchShape {
  readonly batch: number;
  readonly segmentCount: number;
  readonly partBytes: number;
  /** Descriptors of a block in the tables. */
  readonly localParts: number;
  readonly remoteParts: number;
  readonly localSpans: readonly RegionSpan[];
  readonly remoteSpans: readonly RegionSpan[];
  readonly localOffsets: Int32Array;
  readonly remoteOffsets: Int32Array;
  /** Rows `[localOffset, remoteOffset]`, for `DescriptorRuns.offsets`. */
  readonly offsets: Int32Array;
  /** Consecutive parts have consecutive ids in both tables. */
  readonly even: boolean;
}

/** One list of one source: a transfer, if the request has blocks for it. */
export interface ReadShape {
  readonly sourceIndex: number;
  readonly listIndex: number;
  readonly batches: readonly BatchShape[];
  /** Index of an earlier read with equal ids. In most plans all sources have the same ids. */
  readonly sameAs: number | undefined;
}

/** Limits and batch of one group. */
export interface GroupShape {
  readonly localBlocks: number;
  readonly remoteBlocks: number;
  /**
   * Index of the batch: groups with the same segments are one batch. Undefined for a group without
   * a segment.
   */
  readonly batch: number | undefined;
}

/** The part of a request plan that depends on the engine plan only. */
export interface RequestShape {
  readonly groups: readonly GroupShape[];
  readonly batchCount: number;
  readonly reads: readonly ReadShape[];
}

const shapes = new WeakMap<EngineTransferPlan, RequestShape>();

/**
 * The shape of all requests of a plan, computed once per plan: a few numbers instead of hundreds of
 * objects. A worker plans a request once in many milliseconds, with cold caches, so the number of
 * objects decides its cost.
 */
export function requestShape(plan: EngineTransferPlan): RequestShape {
  const known = shapes.get(plan);
  if (known !== undefined) return known;
  const batches: (readonly number[])[] = [];
  const keys: string[] = [];
  const groups = plan.groupPlans.map((group): GroupShape => {
    if (group.segments.length === 0) return { localBlocks: 0, remoteBlocks: 0, batch: undefined };
    const key = group.segments.join();
    if (!keys.includes(key)) {
      keys.push(key);
      batches.push(group.segments);
    }
    const { localParts, remoteParts, localPerLogical, remotePerLogical } = group;
    const remotes = plan.sources.map(({ remoteIndexing }) => remoteIndexing);
    return {
      localBlocks: fewest([plan.localIndexing], group.segments, localParts * localPerLogical),
      remoteBlocks: fewest(remotes, group.segments, remoteParts * remotePerLogical),
      batch: keys.indexOf(key),
    };
  });
  const reads: ReadShape[] = [];
  const made = new Map<string, number>();
  for (const [sourceIndex, source] of plan.sources.entries()) {
    for (const listIndex of source.lists.keys()) {
      const moved = new Set(
        source.segments.filter((index) => plan.segments[index]?.list === listIndex),
      );
      const offsets = [...moved].map((index) => source.remoteIndexing[index]?.offset);
      const key = `${listIndex};${[...moved].join()};${offsets.join()}`;
      const sameAs = made.get(key);
      if (sameAs === undefined) made.set(key, reads.length);
      const own =
        sameAs === undefined
          ? batches.flatMap((all, batch) => batchOf(plan, source, batch, all, moved))
          : [];
      reads.push({ sourceIndex, listIndex, batches: own, sameAs });
    }
  }
  const shape = { groups, batchCount: batches.length, reads };
  shapes.set(plan, shape);
  return shape;
}

function batchOf(
  plan: EngineTransferPlan,
  source: SourcePlan,
  batch: number,
  all: readonly number[],
  moved: ReadonlySet<number>,
): BatchShape[] {
  const indices = all.filter((index) => moved.has(index));
  const [first] = indices;
  const segment = first === undefined ? undefined : plan.segments[first];
  if (segment === undefined) return [];
  const localSpans = spansOf(plan.localIndexing, indices);
  const remoteSpans = spansOf(source.remoteIndexing, indices);
  const { localParts, remoteParts } = segment;
  const [localOffsets, remoteOffsets] = [offsetsOf(localSpans), offsetsOf(remoteSpans)];
  const even = (spans: readonly RegionSpan[], parts: number) =>
    spans.every(
      ({ blockStep, partStep }) => parts === 1 || (partStep === 1 && blockStep === parts),
    );
  return [
    {
      batch,
      segmentCount: indices.length,
      partBytes: indices.reduce((sum, index) => sum + (plan.segments[index]?.lengthBytes ?? 0), 0),
      localParts,
      remoteParts,
      localSpans,
      remoteSpans,
      localOffsets,
      remoteOffsets,
      offsets: Int32Array.from(
        [...localOffsets].flatMap((local, index) => [local, remoteOffsets[index] ?? 0]),
      ),
      even: even(localSpans, localParts) && even(remoteSpans, remoteParts),
    },
  ];
}

const offsetsOf = (spans: readonly RegionSpan[]): Int32Array =>
  Int32Array.from(spans.flatMap(({ offsets }) => [...offsets]));

function spansOf(
  indexing: readonly RegionIndexing[],
  segments: readonly number[],
): readonly RegionSpan[] {
  const spans: { blockStep: number; partStep: number; offsets: number[] }[] = [];
  for (const segment of segments) {
    const found = indexing[segment];
    if (found === undefined) continue;
    const { blockStep, partStep, offset } = found;
    const last = spans.at(-1);
    if (last?.blockStep === blockStep && last.partStep === partStep) last.offsets.push(offset);
    else spans.push({ blockStep, partStep, offsets: [offset] });
  }
  return spans.map(({ offsets, ...steps }) => ({ ...steps, offsets: Int32Array.from(offsets) }));
}

/**
 * The fewest logical blocks over segments. Segments of another stage have a count of 0 and do not
 * limit.
 */
function fewest(
  sides: readonly (readonly RegionIndexing[])[],
  segments: readonly number[],
  perLogical: number,
): number {
  let least = Number.POSITIVE_INFINITY;
  for (const indexing of sides) {
    for (const segment of segments) {
      const count = indexing[segment]?.count ?? 0;
      if (count > 0) least = Math.min(least, count);
    }
  }
  return Math.floor(least / perLogical);
}
