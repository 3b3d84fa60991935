/** One line of the report: ours against theirs, and the ratio that is asked for. */
export interface Row {
  readonly what: string;
  readonly ours: string;
  readonly theirs: string;
  /** Median of the ratios, pair by pair. */
  readonly ratio: number | undefined;
  /** The same of the best of each. */
  readonly best?: number;
  readonly wanted: string;
  /** undefined: reported only, or could not be measured here. */
  readonly met: boolean | undefined;
}

export function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 === 1
    ? (sorted[middle] ?? Number.NaN)
    : ((sorted[middle - 1] ?? Number.NaN) + (sorted[middle] ?? Number.NaN)) / 2;
}

/** The value below which this share lies; of few values the largest. */
export function percentile(values: readonly number[], share: number): number {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.ceil(sorted.length * share) - 1)] ?? Number.NaN;
}

/** The best of ours over the best of theirs: what is left when whatever else the machine does is not in the way. */
export function bestRatio(
  ours: readonly number[],
  theirs: readonly number[],
  best: "least" | "most",
): number {
  const of = best === "least" ? Math.min : Math.max;
  return of(...ours) / of(...theirs);
}

/** "min / median / max" with three digits. */
export function spread(values: readonly number[], unit: string): string {
  const show = (value: number) => Number(value.toPrecision(3)).toString();
  return `${show(Math.min(...values))} / ${show(median(values))} / ${show(Math.max(...values))} ${unit}`;
}

/** The median over pairs of ours[i] / theirs[i]: a drift of the machine's speed cancels. */
export function pairRatio(ours: readonly number[], theirs: readonly number[]): number {
  return median(ours.map((value, i) => value / (theirs[i] ?? Number.NaN)));
}

export function printRows(rows: readonly Row[]): void {
  const cells = rows.map((row) => [
    row.what,
    row.ours,
    row.theirs,
    row.ratio === undefined ? "-" : row.ratio.toFixed(3),
    row.best === undefined ? "-" : row.best.toFixed(3),
    row.wanted,
    row.met === undefined ? "-" : row.met ? "yes" : "NO",
  ]);
  const table = [
    ["what", "ours (min / median / max)", "theirs", "ratio", "of bests", "wanted", "met"],
    ...cells,
  ];
  const widths =
    table[0]?.map((_, column) => Math.max(...table.map((row) => row[column]?.length ?? 0))) ?? [];
  for (const row of table)
    console.log(
      row
        .map((cell, i) => cell.padEnd(widths[i] ?? 0))
        .join("  ")
        .trimEnd(),
    );
}
