import type { EngineTransferPlan, RegionIndexing, SourcePlan } from "../engine/engine-plan-types.js";

/** Neighbouring segments whose blocks step alike: their descriptor ids are expanded in one go. */
export interface RegionSpan {
  readonly blockStep: number;
  readonly partStep: number;
  readonly offsets: Int32Array;
}

/** What one read moves of one batch. */
export interface BatchShape {
  readonly batch: number;
  readonly segmentCount: number;
  /** Bytes of one part in all of its segments. */
  readonly partBytes: number;
  /** Parts of a block in the lists. */
  readonly localParts: number;
  readonly remoteParts: number;
  readonly localSpans: readonly RegionSpan[];
  readonly remoteSpans: readonly RegionSpan[];
  /** Offsets of all spans. */
  readonly localOffsets: Int32Array;
  readonly remoteOffsets: Int32Array;
  /** Rows `[local, remote]` of both, for whoever repeats the runs at each. */
  readonly offsets: Int32Array;
  /** Parts that follow one another are neighbours in both lists. */
  readonly even: boolean;
}

/** One list of one source: a transfer, if the request has something for it. */
export interface ReadShape {
  readonly sourceIndex: number;
  readonly listIndex: number;
  readonly batches: readonly BatchShape[];
  /** Position of an earlier read with equal indices: most plans have one set for all sources. */
  readonly sameAs: number | undefined;
}

export interface GroupShape {
  /** Logical blocks that every segment of the group has. */
  readonly localBlocks: number;
  readonly remoteBlocks: number;
  /** Groups in the same segments are handled as one list. Undefined for a group without a segment. */
  readonly batch: number | undefined;
}

export interface RequestShape {
  readonly groups: readonly GroupShape[];
  readonly batchCount: number;
  readonly reads: readonly ReadShape[];
}

const shapes = new WeakMap<EngineTransferPlan, RequestShape>();

/**
 * What every request asks of a plan's segments, a few numbers instead of hundreds of objects: a worker plans a request once in many
 * milliseconds, with cold caches, and then it is the number of objects that it pays for.
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
      const moved = new Set(source.segments.filter((index) => plan.segments[index]?.list === listIndex));
      const offsets = [...moved].map((index) => source.remoteIndexing[index]?.offset);
      const key = `${listIndex};${[...moved].join()};${offsets.join()}`;
      const sameAs = made.get(key);
      if (sameAs === undefined) made.set(key, reads.length);
      const own =
        sameAs === undefined ? batches.flatMap((all, batch) => batchOf(plan, source, batch, all, moved)) : [];
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
    spans.every(({ blockStep, partStep }) => parts === 1 || (partStep === 1 && blockStep === parts));
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

function spansOf(indexing: readonly RegionIndexing[], segments: readonly number[]): readonly RegionSpan[] {
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

/** Absent segments (another stage's) have no count, and do not limit. */
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
