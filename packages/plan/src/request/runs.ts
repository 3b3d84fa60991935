import { DESCRIPTOR_RUN } from "@kv/interface";

/** A growing list of runs: parts that are consecutive on both sides. */
export interface Runs {
  /** Rows `[local, remote, count]`, with room for more rows behind them. */
  rows: Int32Array;
  length: number;
  parts: number;
}

const NO_ROWS = new Int32Array(0);

/** An empty list. */
export function noRuns(): Runs {
  return { rows: NO_ROWS, length: 0, parts: 0 };
}

/** Makes room for `count` further runs. One call with the final number touches the least memory. */
export function reserveRuns(runs: Runs, count: number): void {
  const wanted = runs.length + count * DESCRIPTOR_RUN;
  if (wanted <= runs.rows.length) return;
  const rows = new Int32Array(wanted);
  rows.set(runs.rows.subarray(0, runs.length));
  runs.rows = rows;
}

/** The rows in use. */
export function rowsOfRuns({ rows, length }: Runs): Int32Array {
  return rows.length === length ? rows : rows.subarray(0, length);
}

/** Adds a run. A run that continues the last one on both sides extends it. */
export function addRun(runs: Runs, local: number, remote: number, count: number): void {
  const { rows, length } = runs;
  runs.parts += count;
  const last = length - DESCRIPTOR_RUN;
  if (last >= 0) {
    const before = rows[last + 2] as number;
    if (
      (rows[last] as number) + before === local &&
      (rows[last + 1] as number) + before === remote
    ) {
      rows[last + 2] = before + count;
      return;
    }
  }
  if (length === rows.length) reserveRuns(runs, 8 + length / DESCRIPTOR_RUN);
  const into = runs.rows;
  into[length] = local;
  into[length + 1] = remote;
  into[length + 2] = count;
  runs.length = length + DESCRIPTOR_RUN;
}

/**
 * Sorts runs by their local parts, and merges all runs that are consecutive on both sides, for any
 * order of the block tables. Ascending input is returned as it is.
 */
export function orderForRuns(runs: Runs): Runs {
  const { rows, length } = runs;
  let ascending = true;
  for (let at = 3; at < length && ascending; at += 3)
    ascending = (rows[at] as number) > (rows[at - 3] as number);
  if (ascending) return runs;
  // To sort numbers without a comparator is several times faster, so a key holds part and position
  // (31 and 22 bits).
  const count = length / 3;
  const keys = new Float64Array(count);
  for (let index = 0; index < count; index++)
    keys[index] = (rows[index * 3] as number) * count + index;
  keys.sort();
  const ordered = noRuns();
  reserveRuns(ordered, count);
  for (let index = 0; index < count; index++) {
    const key = keys[index] as number;
    const local = Math.floor(key / count);
    const at = (key - local * count) * 3;
    addRun(ordered, local, rows[at + 1] as number, rows[at + 2] as number);
  }
  return ordered;
}

/** A local part that is in two of the sorted runs; undefined when there is none. */
export function overlap({ rows, length }: Runs): number | undefined {
  for (let at = 3; at < length; at += 3) {
    if ((rows[at] as number) < (rows[at - 3] as number) + (rows[at - 1] as number)) return rows[at];
  }
  return undefined;
}

/** All parts of one side: column 0 is the local side, 1 the remote one. */
export function partsOfRuns({ rows, length, parts }: Runs, column: 0 | 1): Int32Array {
  const out = new Int32Array(parts);
  let cursor = 0;
  for (let at = 0; at < length; at += 3) {
    const first = rows[at + column] as number;
    const count = rows[at + 2] as number;
    for (let index = 0; index < count; index++) out[cursor++] = first + index;
  }
  return out;
}

/** Block lists of both sides, and the stretch of parts to pair. */
export interface BlockLists {
  readonly localIds: readonly number[];
  readonly remoteIds: readonly number[];
  readonly localPer: number;
  readonly remotePer: number;
  /** The first local part, counted over the whole list. */
  readonly localStart: number;
  readonly remoteStart: number;
  readonly count: number;
}

/**
 * Pairs two block lists part by part, and adds a run for each stretch that is consecutive on both
 * sides.
 */
export function addBlockRuns(runs: Runs, lists: BlockLists): void {
  const { localIds, remoteIds, localPer, remotePer, localStart, remoteStart, count } = lists;
  if (localPer === remotePer && localStart % localPer === 0 && remoteStart % remotePer === 0) {
    addWholeBlocks(runs, lists);
    return;
  }
  let done = 0;
  while (done < count) {
    const [localAt, remoteAt] = [localStart + done, remoteStart + done];
    const [localPart, remotePart] = [localAt % localPer, remoteAt % remotePer];
    const length = Math.min(localPer - localPart, remotePer - remotePart, count - done);
    const local = (localIds[(localAt - localPart) / localPer] as number) * localPer + localPart;
    const remote =
      (remoteIds[(remoteAt - remotePart) / remotePer] as number) * remotePer + remotePart;
    addRun(runs, local, remote, length);
    done += length;
  }
}

/** The common case: blocks of one size, paired block by block. */
function addWholeBlocks(runs: Runs, lists: BlockLists): void {
  const { localIds, remoteIds, localPer: per, localStart, remoteStart, count } = lists;
  const [skipLocal, skipRemote] = [localStart / per, remoteStart / per];
  const blocks = Math.ceil(count / per);
  const last = count - (blocks - 1) * per;
  const goesOn = (index: number) =>
    localIds[index + skipLocal] === (localIds[index + skipLocal - 1] as number) + 1 &&
    remoteIds[index + skipRemote] === (remoteIds[index + skipRemote - 1] as number) + 1;
  let found = 1;
  for (let index = 1; index < blocks; index++) if (!goesOn(index)) found += 1;
  reserveRuns(runs, found);
  let begin = 0;
  for (let end = 1; end <= blocks; end++) {
    if (end < blocks && goesOn(end)) continue;
    const length = (end - begin - 1) * per + (end === blocks ? last : per);
    const [local, remote] = [
      localIds[begin + skipLocal] as number,
      remoteIds[begin + skipRemote] as number,
    ];
    addRun(runs, local * per, remote * per, length);
    begin = end;
  }
}
