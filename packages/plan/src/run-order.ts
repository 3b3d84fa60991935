/** Rows `[local, remote, count]` of parts that are consecutive on both sides, being collected. */
export interface Runs {
  rows: number[];
  /** Parts in all rows. */
  parts: number;
}

export function noRuns(): Runs {
  return { rows: [], parts: 0 };
}

/** Adds a run; one that goes on where the last one ends becomes part of it. */
export function addRun(runs: Runs, local: number, remote: number, count: number): void {
  const { rows } = runs;
  runs.parts += count;
  const last = rows.length - 3;
  if (last >= 0) {
    const length = rows[last + 2] as number;
    if ((rows[last] as number) + length === local && (rows[last + 1] as number) + length === remote) {
      rows[last + 2] = length + count;
      return;
    }
  }
  rows.push(local, remote, count);
}

/**
 * Brings runs into the order of their local parts, so that every pair of neighbours which could be merged (consecutive on both sides)
 * becomes one, whatever order the block tables were in. Ascending input is left alone.
 */
export function orderForRuns(runs: Runs): Runs {
  const { rows } = runs;
  let ascending = true;
  for (let at = 3; at < rows.length && ascending; at += 3)
    ascending = (rows[at] as number) > (rows[at - 3] as number);
  if (ascending) return runs;
  // Sorting numbers without a comparator is several times faster: part and position share one number (31 and 22 bits).
  const count = rows.length / 3;
  const keys = new Float64Array(count);
  for (let index = 0; index < count; index++) keys[index] = (rows[index * 3] as number) * count + index;
  keys.sort();
  const ordered = noRuns();
  for (let index = 0; index < count; index++) {
    const key = keys[index] as number;
    const local = Math.floor(key / count);
    const at = (key - local * count) * 3;
    addRun(ordered, local, rows[at + 1] as number, rows[at + 2] as number);
  }
  return ordered;
}

/** A local part that is in two of the ordered runs; undefined when there is none. */
export function overlap({ rows }: Runs): number | undefined {
  for (let at = 3; at < rows.length; at += 3) {
    if ((rows[at] as number) < (rows[at - 3] as number) + (rows[at - 1] as number)) return rows[at];
  }
  return undefined;
}

/** Every part of the runs, of one side: column 0 is the local one, 1 the remote one. */
export function partsOfRuns({ rows, parts }: Runs, column: 0 | 1): Int32Array {
  const out = new Int32Array(parts);
  let cursor = 0;
  for (let at = 0; at < rows.length; at += 3) {
    const first = rows[at + column] as number;
    const count = rows[at + 2] as number;
    for (let index = 0; index < count; index++) out[cursor++] = first + index;
  }
  return out;
}
