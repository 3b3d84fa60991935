import type { DescriptorPairs, DescriptorRuns } from "@kv/interface";
import type { BatchShape, ReadShape, RegionSpan } from "./request-shape.js";
import { addRun, noRuns, partsOfRuns, type Runs, rowsOfRuns } from "./runs.js";

/** One transfer: pairs of descriptor ids in the two tables of a source's list. */
export interface RequestRead {
  /** Tensor-parallel rank that is read. */
  readonly remoteRank: number;
  /** Pipeline stage of that rank. */
  readonly remotePpRank: number;
  /** Index into `EngineTransferPlan.sources`. */
  readonly sourceIndex: number;
  /** Index into the source's `lists`. */
  readonly listIndex: number;
  /** Rows `[localId, remoteId, count]`: `count` descriptors that are consecutive in both tables. */
  readonly runs: Int32Array;
  /**
   * The local ids of all runs. Written at first use; reads of one request may share the array, so
   * do not change it.
   */
  readonly localIds: Int32Array;
  /** The remote ids of all runs, pairwise with `localIds`. Shared in the same way. */
  readonly remoteIds: Int32Array;
  /** The shorter of the two spellings, for a `TransferRequest`. */
  readonly descriptors: DescriptorPairs | DescriptorRuns;
  /** `localIds.length`, known without writing the ids. */
  readonly descriptorCount: number;
  /** Bytes that the read moves. */
  readonly lengthBytes: number;
}

/** The runs of one batch of a request. Their parts are written at first use. */
export interface Batch {
  readonly runs: Runs;
  localParts(): Int32Array;
  remoteParts(): Int32Array;
}

/** A batch from sorted runs. */
export function batchOfRuns(runs: Runs): Batch {
  let local: Int32Array | undefined;
  let remote: Int32Array | undefined;
  return {
    runs,
    localParts() {
      local ??= partsOfRuns(runs, 0);
      return local;
    },
    remoteParts() {
      remote ??= partsOfRuns(runs, 1);
      return remote;
    },
  };
}

/** The descriptor ids of a read. Reads with equal ids share one. */
export interface ReadIndices {
  readonly descriptorCount: number;
  readonly runCount: number;
  readonly lengthBytes: number;
  runs(): Int32Array;
  localIds(): Int32Array;
  remoteIds(): Int32Array;
  /**
   * One set of runs with the offsets of all segments, where all segments have the same runs;
   * undefined otherwise.
   */
  repeated(): DescriptorRuns | undefined;
}

/** The descriptor ids of a read with this shape, for the batches of a request. */
export function readIndices(
  shape: ReadShape,
  batches: readonly (Batch | undefined)[],
): ReadIndices {
  const pairs: (readonly [BatchShape, Batch])[] = [];
  let descriptorCount = 0;
  let lengthBytes = 0;
  for (const one of shape.batches) {
    const batch = batches[one.batch];
    if (batch === undefined) continue;
    pairs.push([one, batch]);
    descriptorCount += batch.runs.parts * one.segmentCount;
    lengthBytes += batch.runs.parts * one.partBytes;
  }
  let runs: Int32Array | undefined;
  let localIds: Int32Array | undefined;
  let remoteIds: Int32Array | undefined;
  let repeated: DescriptorRuns | undefined;
  const runsOnce = () => {
    runs ??= runRows(pairs);
    return runs;
  };
  return {
    descriptorCount,
    lengthBytes,
    get runCount() {
      if (pairs.every(([{ even }]) => even)) {
        return pairs.reduce(
          (sum, [{ segmentCount }, batch]) => sum + (batch.runs.length / 3) * segmentCount,
          0,
        );
      }
      return runsOnce().length / 3;
    },
    runs: runsOnce,
    repeated() {
      const [only, another] = pairs;
      if (repeated !== undefined || only === undefined || another !== undefined || !only[0].even)
        return repeated;
      const [{ offsets }, batch] = only;
      repeated = { runs: rowsOfRuns(batch.runs), offsets };
      return repeated;
    },
    localIds() {
      localIds ??= expand(pairs, descriptorCount, "localParts", "localSpans");
      return localIds;
    },
    remoteIds() {
      remoteIds ??= expand(pairs, descriptorCount, "remoteParts", "remoteSpans");
      return remoteIds;
    },
  };
}

/** One read of a request. Ids and runs are computed at first use. */
export function requestRead(
  indices: ReadIndices,
  place: { remoteRank: number; remotePpRank: number; sourceIndex: number; listIndex: number },
): RequestRead {
  const { remoteRank, remotePpRank, sourceIndex, listIndex } = place;
  return {
    remoteRank,
    remotePpRank,
    sourceIndex,
    listIndex,
    descriptorCount: indices.descriptorCount,
    lengthBytes: indices.lengthBytes,
    get runs() {
      return indices.runs();
    },
    get localIds() {
      return indices.localIds();
    },
    get remoteIds() {
      return indices.remoteIds();
    },
    get descriptors() {
      const repeated = indices.repeated();
      if (repeated !== undefined) return repeated;
      // A run takes three numbers and a pair two, and pairs are written many at a time.
      const merges = indices.runCount * 2 <= indices.descriptorCount;
      return merges
        ? { runs: indices.runs() }
        : { localIds: indices.localIds(), remoteIds: indices.remoteIds() };
    },
  };
}

/** The ids of one side, segment by segment. */
function expand(
  pairs: readonly (readonly [BatchShape, Batch])[],
  length: number,
  which: "localParts" | "remoteParts",
  spans: "localSpans" | "remoteSpans",
): Int32Array {
  const out = new Int32Array(length);
  let cursor = 0;
  for (const [shape, batch] of pairs) {
    for (const { blockStep, partStep, offsets } of shape[spans]) {
      const ids = stepped(batch[which](), shape[which], blockStep, partStep);
      for (const offset of offsets) {
        for (let index = 0; index < ids.length; index++)
          out[cursor + index] = offset + (ids[index] as number);
        cursor += ids.length;
      }
    }
  }
  return out;
}

function stepped(ids: Int32Array, parts: number, blockStep: number, partStep: number): Int32Array {
  if (blockStep === parts && partStep === 1) return ids;
  return ids.map((id) => {
    const part = id % parts;
    return ((id - part) / parts) * blockStep + part * partStep;
  });
}

function runRows(pairs: readonly (readonly [BatchShape, Batch])[]): Int32Array {
  if (pairs.every(([{ even }]) => even)) return evenRows(pairs);
  const out: Runs = noRuns();
  for (const [shape, batch] of pairs) {
    const [locals, remotes] = [offsetsOf(shape.localSpans), offsetsOf(shape.remoteSpans)];
    for (const [index, local] of locals.entries())
      addStepped(out, batch.runs, shape, local, remotes[index] as Steps);
  }
  return rowsOfRuns(out);
}

/** Rows where every segment has the same runs at its own offset. */
function evenRows(pairs: readonly (readonly [BatchShape, Batch])[]): Int32Array {
  const length = pairs.reduce(
    (sum, [{ segmentCount }, { runs }]) => sum + runs.length * segmentCount,
    0,
  );
  const out = new Int32Array(length);
  let cursor = 0;
  for (const [shape, batch] of pairs) {
    const { rows, length } = batch.runs;
    const { localOffsets, remoteOffsets } = shape;
    for (let segment = 0; segment < localOffsets.length; segment++) {
      const local = localOffsets[segment] as number;
      const remote = remoteOffsets[segment] as number;
      for (let at = 0; at < length; at += 3) {
        out[cursor] = local + (rows[at] as number);
        out[cursor + 1] = remote + (rows[at + 1] as number);
        out[cursor + 2] = rows[at + 2] as number;
        cursor += 3;
      }
    }
  }
  return out;
}

interface Steps {
  readonly offset: number;
  readonly blockStep: number;
  readonly partStep: number;
}

function offsetsOf(spans: readonly RegionSpan[]): Steps[] {
  return spans.flatMap(({ offsets, blockStep, partStep }) =>
    [...offsets].map((offset) => ({ offset, blockStep, partStep })),
  );
}

/**
 * Adds runs to tables with a row per part, where neighbours are the same part of neighbouring
 * blocks.
 */
function addStepped(
  out: Runs,
  { rows, length }: Runs,
  shape: BatchShape,
  local: Steps,
  remote: Steps,
): void {
  const step = Math.max(shape.localParts, shape.remoteParts);
  const index = (part: number, parts: number, { offset, blockStep, partStep }: Steps) =>
    parts === 1
      ? offset + part
      : offset + Math.floor(part / parts) * blockStep + (part % parts) * partStep;
  for (let at = 0; at < length; at += 3) {
    const [first, from, count] = [
      rows[at] as number,
      rows[at + 1] as number,
      rows[at + 2] as number,
    ];
    for (let begin = 0; begin < Math.min(step, count); begin++) {
      for (let part = begin; part < count; part += step) {
        addRun(
          out,
          index(first + part, shape.localParts, local),
          index(from + part, shape.remoteParts, remote),
          1,
        );
      }
    }
  }
}
