/**
 * Brings pairs into the order of their local ids, so that every pair of neighbours which could be merged (consecutive on both sides)
 * becomes one, whatever order the block tables were in. In place; ascending input is left alone.
 */
export function orderForRuns(local: Int32Array, remote: Int32Array): void {
  const count = local.length;
  let ascending = true;
  for (let index = 1; index < count && ascending; index++) {
    ascending = (local[index] as number) > (local[index - 1] as number);
  }
  if (ascending) return;
  // Sorting numbers without a comparator is several times faster: id and position share one number (31 and 22 bits).
  const keys = new Float64Array(count);
  for (let index = 0; index < count; index++) keys[index] = (local[index] as number) * count + index;
  keys.sort();
  const before = remote.slice();
  for (let index = 0; index < count; index++) {
    const key = keys[index] as number;
    const id = Math.floor(key / count);
    local[index] = id;
    remote[index] = before[key - id * count] as number;
  }
}

/** Runs of pairs that are consecutive on both sides: what a transport can merge into one descriptor each. */
export function countRuns(local: Int32Array, remote: Int32Array): number {
  let runs = local.length === 0 ? 0 : 1;
  for (let index = 1; index < local.length; index++) {
    const together =
      (local[index] as number) === (local[index - 1] as number) + 1 &&
      (remote[index] as number) === (remote[index - 1] as number) + 1;
    if (!together) runs += 1;
  }
  return runs;
}
