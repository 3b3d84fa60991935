/** One line of the report: our measurement against the reference, and the ratio. */
export interface Row {
  readonly what: string;
  readonly ours: string;
  readonly theirs: string;
  /** The median of the pairwise ratios. */
  readonly ratio: number | undefined;
  /** The ratio of the best values. */
  readonly best?: number;
  readonly wanted: string;
  /** undefined: reported only, or not measurable on this machine. */
  readonly met: boolean | undefined;
  /** How often each side was measured. */
  readonly rounds?: number;
}

export function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 === 1
    ? (sorted[middle] ?? Number.NaN)
    : ((sorted[middle - 1] ?? Number.NaN) + (sorted[middle] ?? Number.NaN)) / 2;
}

/** The value below which this share of the values lies; with few values the largest. */
export function percentile(values: readonly number[], share: number): number {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.ceil(sorted.length * share) - 1)] ?? Number.NaN;
}

/** The ratio of the best values, which other load of the machine disturbs least. */
function bestRatio(
  ours: readonly number[],
  theirs: readonly number[],
  best: "least" | "most",
): number {
  const of = best === "least" ? Math.min : Math.max;
  return of(...ours) / of(...theirs);
}

/** `min / median / max` with three significant digits. */
export function spread(values: readonly number[], unit: string): string {
  const show = (value: number) => Number(value.toPrecision(3)).toString();
  return `${show(Math.min(...values))} / ${show(median(values))} / ${show(Math.max(...values))} ${unit}`;
}

/** The median of ours[i] / theirs[i]. A drift of the machine's speed cancels out. */
export function pairRatio(ours: readonly number[], theirs: readonly number[]): number {
  return median(ours.map((value, i) => value / (theirs[i] ?? Number.NaN)));
}

/** The order of two sides in a round: each goes first in every other one. */
export const inTurn = (round: number) => (round % 2 === 0 ? ([0, 1] as const) : ([1, 0] as const));

/**
 * A row of two figures with their ratio. `bound`: of the ratio; without it the row is only
 * reported.
 */
export function rowOf(
  what: string,
  [ours, theirs]: readonly [string, string],
  ratio: number,
  relation: "<=" | ">=" = "<=",
  bound?: number,
): Row {
  const isMet = (most: number) => (relation === "<=" ? ratio <= most : ratio >= most);
  const [wanted, met] = bound === undefined ? ["reported"] : [`${relation} ${bound}`, isMet(bound)];
  return { what, ours, theirs, ratio, wanted, met };
}

/** A row of two series that were measured in turn. `bound`: of the ratio of their pairs. */
export function compare(
  what: string,
  [ours, theirs]: readonly [readonly number[], readonly number[]],
  unit: string,
  relation: "<=" | ">=",
  bound?: number,
): Row {
  const shown = [spread(ours, unit), spread(theirs, unit)] as const;
  return {
    ...rowOf(what, shown, pairRatio(ours, theirs), relation, bound),
    best: bestRatio(ours, theirs, relation === "<=" ? "least" : "most"),
    rounds: ours.length,
  };
}

/** A row without a ratio. `theirs`: what stands beside it, if anything does. */
export function alone(
  what: string,
  ours: string,
  wanted = "reported",
  met?: boolean,
  theirs = "-",
  rounds?: number,
): Row {
  return {
    what,
    ours,
    theirs,
    ratio: undefined,
    wanted,
    met,
    ...(rounds === undefined ? {} : { rounds }),
  };
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
    ["what", "ours (min / median / max)", "theirs", "ratio", "ratio of best", "wanted", "met"],
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
