import {
  DESCRIPTOR_OFFSET,
  DESCRIPTOR_RUN,
  type DescriptorPairs,
  type DescriptorRuns,
} from "@kv/interface";
import type { RegionIndexing } from "../engine/descriptor-tables.js";
import type { EngineTransferPlan } from "../engine/engine-plan.js";

/** One transfer: pairs of descriptor ids in the two tables of a source's list. */
export interface RequestRead {
  readonly remoteRank: number;
  readonly remotePpRank: number;
  readonly sourceIndex: number;
  readonly listIndex: number;
  /** Rows `[localId, remoteId, count]`: `count` descriptors, consecutive in both tables. */
  readonly runs: Int32Array;
  /** Written at first use; reads may share the array, so do not change it. */
  readonly localIds: Int32Array;
  /** The remote ids, pairwise with `localIds` and shared likewise. */
  readonly remoteIds: Int32Array;
  /** The shorter spelling, for a `TransferRequest`. */
  readonly descriptors: DescriptorPairs | DescriptorRuns;
  /** `localIds.length`, without writing the ids. */
  readonly descriptorCount: number;
  readonly lengthBytes: number;
}

export interface BlockLists {
  readonly localIds: readonly number[];
  readonly remoteIds: readonly number[];
  readonly localPer: number;
  readonly remotePer: number;
  /** First local part, counted over the whole list. */
  readonly localStart: number;
  readonly remoteStart: number;
  readonly count: number;
}

/** A growing list of runs: parts that are consecutive on both sides. */
export class Runs {
  #rows: Int32Array;
  #length = 0;

  constructor(capacity = 8) {
    this.#rows = new Int32Array(capacity * DESCRIPTOR_RUN);
  }

  get rows(): Int32Array {
    return this.#rows.length === this.#length ? this.#rows : this.#rows.subarray(0, this.#length);
  }

  /** A run that continues the last one on both sides extends it. */
  add(local: number, remote: number, count: number): void {
    const [rows, at] = [this.#rows, this.#length];
    const last = at - DESCRIPTOR_RUN;
    if (last >= 0) {
      const before = rows[last + 2] as number;
      if (rows[last] === local - before && rows[last + 1] === remote - before) {
        rows[last + 2] = before + count;
        return;
      }
    }
    if (at === rows.length) {
      this.#rows = new Int32Array(2 * at);
      this.#rows.set(rows);
    }
    this.#rows[at] = local;
    this.#rows[at + 1] = remote;
    this.#rows[at + 2] = count;
    this.#length = at + DESCRIPTOR_RUN;
  }

  addBlocks(lists: BlockLists): void {
    const { localIds, remoteIds, localPer, remotePer, localStart, remoteStart } = lists;
    let [localPart, remotePart] = [localStart % localPer, remoteStart % remotePer];
    let [localAt, remoteAt] = [
      (localStart - localPart) / localPer,
      (remoteStart - remotePart) / remotePer,
    ];
    for (let left = lists.count; left > 0; ) {
      const length = Math.min(localPer - localPart, remotePer - remotePart, left);
      this.add(
        (localIds[localAt] as number) * localPer + localPart,
        (remoteIds[remoteAt] as number) * remotePer + remotePart,
        length,
      );
      left -= length;
      localPart += length;
      remotePart += length;
      if (localPart === localPer) {
        localPart = 0;
        localAt++;
      }
      if (remotePart === remotePer) {
        remotePart = 0;
        remoteAt++;
      }
    }
  }

  /** Sorts the rows by local part and merges runs that are consecutive on both sides. */
  ordered(): Int32Array {
    const { rows } = this;
    let isAscending = true;
    for (let at = 3; at < rows.length && isAscending; at += 3)
      isAscending = (rows[at] as number) > (rows[at - 3] as number);
    if (isAscending) return rows;
    // Sorting numbers without a comparator is several times faster, so a key holds part and
    // position (31 and 22 bits).
    const count = rows.length / 3;
    const keys = new Float64Array(count);
    for (let index = 0; index < count; index++)
      keys[index] = (rows[index * 3] as number) * count + index;
    const ordered = new Runs(count);
    for (const key of keys.sort()) {
      const local = Math.floor(key / count);
      const at = (key - local * count) * 3;
      ordered.add(local, rows[at + 1] as number, rows[at + 2] as number);
    }
    return ordered.rows;
  }
}

/** Returns a local part that is in two of the ordered rows. */
export function overlap(rows: Int32Array): number | undefined {
  for (let at = 3; at < rows.length; at += 3) {
    if ((rows[at] as number) < (rows[at - 3] as number) + (rows[at - 1] as number)) return rows[at];
  }
  return undefined;
}

/** Segments with the same runs, in one list of one source. */
export interface BatchShape {
  readonly batch: number;
  readonly partBytes: number;
  readonly localParts: number;
  readonly remoteParts: number;
  readonly local: readonly RegionIndexing[];
  readonly remote: readonly RegionIndexing[];
  /** Rows `[localOffset, remoteOffset]`, for `DescriptorRuns.offsets`. */
  readonly offsets: Int32Array;
  /** Consecutive parts have consecutive ids in both tables. */
  readonly isEven: boolean;
}

type ReadPlace = Pick<RequestRead, "remoteRank" | "remotePpRank" | "sourceIndex" | "listIndex">;

export interface GroupShape {
  readonly localBlocks: number;
  readonly remoteBlocks: number;
  /** Groups with the same segments are one batch. Undefined without a segment. */
  readonly batch: number | undefined;
}

export interface RequestShape {
  readonly groups: readonly GroupShape[];
  readonly batchCount: number;
  /**
   * One list of one source each: a transfer, if the request has blocks for it. Reads with equal ids
   * share batches.
   */
  readonly reads: readonly { readonly place: ReadPlace; readonly batches: readonly BatchShape[] }[];
}

const shapes = new WeakMap<EngineTransferPlan, RequestShape>();

/**
 * Computed once per plan: a worker plans rarely and with cold caches, so the number of objects
 * decides the cost.
 */
export function requestShape(plan: EngineTransferPlan): RequestShape {
  const known = shapes.get(plan);
  if (known !== undefined) return known;
  const batches = new Map<string, readonly number[]>();
  const remotes = plan.sources.map(({ remoteIndexing }) => remoteIndexing);
  const groups = plan.groupPlans.map((group): GroupShape => {
    const { segments, localParts, remoteParts, localPerLogical, remotePerLogical } = group;
    if (segments.length === 0) return { localBlocks: 0, remoteBlocks: 0, batch: undefined };
    const key = segments.join();
    batches.set(key, segments);
    return {
      localBlocks: fewest([plan.localIndexing], segments, localParts * localPerLogical),
      remoteBlocks: fewest(remotes, segments, remoteParts * remotePerLogical),
      batch: [...batches.keys()].indexOf(key),
    };
  });
  const made = new Map<string, readonly BatchShape[]>();
  const reads = plan.sources.flatMap((source, sourceIndex) =>
    [...source.lists.keys()].map((listIndex) => {
      const { remoteRank, remotePpRank, segments, remoteIndexing } = source;
      const moved = new Set(segments.filter((index) => plan.segments[index]?.list === listIndex));
      const offsets = [...moved].map((index) => remoteIndexing[index]?.offset);
      const key = `${[...moved].join()};${offsets.join()}`;
      const shared =
        made.get(key) ??
        [...batches.values()].flatMap((all, batch) =>
          batchShape(
            plan,
            remoteIndexing,
            batch,
            all.filter((index) => moved.has(index)),
          ),
        );
      made.set(key, shared);
      const place = { remoteRank, remotePpRank, sourceIndex, listIndex };
      return { place, batches: shared };
    }),
  );
  const shape = { groups, batchCount: batches.size, reads };
  shapes.set(plan, shape);
  return shape;
}

function batchShape(
  plan: EngineTransferPlan,
  remoteIndexing: readonly RegionIndexing[],
  batch: number,
  indices: readonly number[],
): BatchShape[] {
  const segments = indices.flatMap((index) => plan.segments[index] ?? []);
  const [first] = segments;
  if (first === undefined) return [];
  const { localParts, remoteParts } = first;
  const local = indices.map((index) => plan.localIndexing[index] as RegionIndexing);
  const remote = indices.map((index) => remoteIndexing[index] as RegionIndexing);
  const isEven = (side: readonly RegionIndexing[], parts: number) =>
    side.every(({ blockStep, partStep }) => parts === 1 || (partStep === 1 && blockStep === parts));
  return [
    {
      batch,
      partBytes: segments.reduce((sum, { lengthBytes }) => sum + lengthBytes, 0),
      localParts,
      remoteParts,
      local,
      remote,
      offsets: Int32Array.from(
        local.flatMap(({ offset }, index) => [offset, remote[index]?.offset ?? 0]),
      ),
      isEven: isEven(local, localParts) && isEven(remote, remoteParts),
    },
  ];
}

/** Segments of another stage have a count of 0 and do not limit. */
function fewest(
  sides: readonly (readonly RegionIndexing[])[],
  segments: readonly number[],
  perLogical: number,
): number {
  let least = Number.POSITIVE_INFINITY;
  for (const indexing of sides)
    for (const segment of segments) least = Math.min(least, indexing[segment]?.count || least);
  return Math.floor(least / perLogical);
}

/**
 * The ids of a read: the runs of each batch, once for each segment. Written at first use, and
 * shared by reads with equal ids.
 */
export class ReadIds {
  readonly descriptorCount: number;
  readonly lengthBytes: number;
  readonly #pairs: readonly (readonly [shape: BatchShape, rows: Int32Array])[];
  #runs: Int32Array | undefined;
  #localIds: Int32Array | undefined;
  #remoteIds: Int32Array | undefined;
  #repeated: DescriptorRuns | undefined;

  constructor(shapes: readonly BatchShape[], rows: readonly (Int32Array | undefined)[]) {
    let [descriptorCount, lengthBytes] = [0, 0];
    const pairs: [BatchShape, Int32Array][] = [];
    for (const shape of shapes) {
      const own = rows[shape.batch];
      if (own === undefined) continue;
      pairs.push([shape, own]);
      let parts = 0;
      for (let at = 2; at < own.length; at += 3) parts += own[at] as number;
      descriptorCount += parts * shape.local.length;
      lengthBytes += parts * shape.partBytes;
    }
    this.#pairs = pairs;
    this.descriptorCount = descriptorCount;
    this.lengthBytes = lengthBytes;
  }

  get runCount(): number {
    if (!this.#isEven) return this.runs.length / 3;
    return this.#pairs.reduce(
      (sum, [{ local }, rows]) => sum + (rows.length / 3) * local.length,
      0,
    );
  }

  get runs(): Int32Array {
    this.#runs ??= this.#isEven ? evenRows(this.#pairs, this.runCount) : steppedRows(this.#pairs);
    return this.#runs;
  }

  get localIds(): Int32Array {
    this.#localIds ??= this.#expand("local", 0);
    return this.#localIds;
  }

  get remoteIds(): Int32Array {
    this.#remoteIds ??= this.#expand("remote", 1);
    return this.#remoteIds;
  }

  get descriptors(): DescriptorPairs | DescriptorRuns {
    const [only, another] = this.#pairs;
    if (only?.[0].isEven === true && another === undefined) {
      const [{ offsets }, runs] = only;
      this.#repeated ??= { runs, offsets };
      return this.#repeated;
    }
    // A run takes three numbers and a pair two, but pairs are written many at a time.
    if (this.runCount * 2 <= this.descriptorCount) return { runs: this.runs };
    return { localIds: this.localIds, remoteIds: this.remoteIds };
  }

  get #isEven(): boolean {
    return this.#pairs.every(([{ isEven }]) => isEven);
  }

  #expand(side: "local" | "remote", column: 0 | 1): Int32Array {
    const out = new Int32Array(this.descriptorCount);
    let cursor = 0;
    for (const [shape, rows] of this.#pairs) {
      const parts = side === "local" ? shape.localParts : shape.remoteParts;
      let before: RegionIndexing | undefined;
      let begin = cursor;
      for (const place of shape[side]) {
        const { offset, blockStep, partStep } = place;
        if (before?.blockStep === blockStep && before.partStep === partStep) {
          const end = cursor;
          const shift = offset - before.offset;
          while (begin < end) out[cursor++] = (out[begin++] as number) + shift;
        } else {
          begin = cursor;
          for (let at = 0; at < rows.length; at += 3) {
            const first = rows[at + column] as number;
            const last = first + (rows[at + 2] as number);
            for (let part = first; part < last; part++) out[cursor++] = idOf(part, parts, place);
          }
        }
        before = place;
      }
    }
    return out;
  }
}

export function requestRead(place: ReadPlace, ids: ReadIds): RequestRead {
  return {
    ...place,
    descriptorCount: ids.descriptorCount,
    lengthBytes: ids.lengthBytes,
    get runs() {
      return ids.runs;
    },
    get localIds() {
      return ids.localIds;
    },
    get remoteIds() {
      return ids.remoteIds;
    },
    get descriptors() {
      return ids.descriptors;
    },
  };
}

/** Every segment has the same runs at its own offset. */
function evenRows(
  pairs: readonly (readonly [BatchShape, Int32Array])[],
  count: number,
): Int32Array {
  const out = new Int32Array(count * 3);
  let cursor = 0;
  for (const [{ offsets }, rows] of pairs) {
    for (let segment = 0; segment < offsets.length; segment += DESCRIPTOR_OFFSET) {
      const [local, remote] = [offsets[segment] as number, offsets[segment + 1] as number];
      for (let at = 0; at < rows.length; at += 3) {
        out[cursor++] = local + (rows[at] as number);
        out[cursor++] = remote + (rows[at + 1] as number);
        out[cursor++] = rows[at + 2] as number;
      }
    }
  }
  return out;
}

/** For tables with a row per part, whose neighbours are the same part of neighbouring blocks. */
function steppedRows(pairs: readonly (readonly [BatchShape, Int32Array])[]): Int32Array {
  const out = new Runs();
  for (const [{ local, remote, localParts, remoteParts }, rows] of pairs) {
    const step = Math.max(localParts, remoteParts);
    for (const [segment, mine] of local.entries()) {
      const theirs = remote[segment] as RegionIndexing;
      for (let at = 0; at < rows.length; at += 3) {
        const [first = 0, from = 0, count = 0] = rows.subarray(at, at + 3);
        for (let begin = 0; begin < Math.min(step, count); begin++) {
          for (let part = begin; part < count; part += step) {
            const localId = idOf(first + part, localParts, mine);
            out.add(localId, idOf(from + part, remoteParts, theirs), 1);
          }
        }
      }
    }
  }
  return out.rows;
}

function idOf(
  part: number,
  parts: number,
  { offset, blockStep, partStep }: RegionIndexing,
): number {
  if (parts === 1) return offset + part;
  return offset + Math.floor(part / parts) * blockStep + (part % parts) * partStep;
}

/** Exchanges local and remote ids: a producer that pushes posts its consumer's read as a write. */
export function swapDirection(
  descriptors: DescriptorPairs | DescriptorRuns,
): DescriptorPairs | DescriptorRuns {
  if (descriptors.runs === undefined)
    return { localIds: descriptors.remoteIds, remoteIds: descriptors.localIds };
  const { runs, offsets } = descriptors;
  const swapped = { runs: swapColumns(runs, DESCRIPTOR_RUN) };
  if (offsets === undefined) return swapped;
  return { ...swapped, offsets: swapColumns(offsets, DESCRIPTOR_OFFSET) };
}

function swapColumns(rows: Int32Array, perRow: number): Int32Array {
  const out = rows.slice();
  for (let at = 0; at < out.length; at += perRow) {
    out[at] = rows[at + 1] as number;
    out[at + 1] = rows[at] as number;
  }
  return out;
}
