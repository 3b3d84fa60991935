/** Consecutive block ids, `first` to `first + length - 1`. */
export interface BlockRun {
  readonly first: number;
  readonly length: number;
}

/** Splits ascending ids into maximal runs. */
export function runsOf(ascending: readonly number[]): BlockRun[] {
  const runs: { first: number; length: number }[] = [];
  for (const id of ascending) {
    const last = runs.at(-1);
    if (last !== undefined && last.first + last.length === id) last.length++;
    else runs.push({ first: id, length: 1 });
  }
  return runs;
}

/**
 * Chooses `count` of the given ascending ids in as few runs as it can: the shortest run that holds all of them, else the longest
 * runs first. NIXL merges descriptors only where both sides are consecutive, so a scattered choice costs up to 9 times
 * the transfer time.
 */
export function chooseRuns(ascending: readonly number[], count: number): number[] {
  const runs = runsOf(ascending);
  let fitting: BlockRun | undefined;
  for (const run of runs) {
    if (run.length >= count && (fitting === undefined || run.length < fitting.length)) fitting = run;
  }
  const chosen: number[] = [];
  const order =
    fitting === undefined ? runs.sort((a, b) => b.length - a.length || a.first - b.first) : [fitting];
  for (const run of order) {
    for (let i = 0; i < run.length && chosen.length < count; i++) chosen.push(run.first + i);
  }
  return chosen;
}
