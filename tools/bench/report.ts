/** Our measurement against the reference. */
export interface Row {
  readonly what: string;
  readonly ours: string;
  readonly theirs: string;
  readonly ratio: number | undefined;
  /** Of the best values, which other load disturbs least. */
  readonly best?: number;
  readonly wanted: string;
  /** undefined: reported only, or not measurable here. */
  readonly met: boolean | undefined;
  readonly rounds?: number;
}

export function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 === 1
    ? (sorted[middle] ?? Number.NaN)
    : ((sorted[middle - 1] ?? Number.NaN) + (sorted[middle] ?? Number.NaN)) / 2;
}

/** With few values the largest. */
export function percentile(values: readonly number[], share: number): number {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.ceil(sorted.length * share) - 1)] ?? Number.NaN;
}

/** `min / median / max` with three significant digits. */
export function spread(values: readonly number[], unit: string): string {
  const show = (value: number) => Number(value.toPrecision(3)).toString();
  return `${show(Math.min(...values))} / ${show(median(values))} / ${show(Math.max(...values))} ${unit}`;
}

/** A drift of the machine's speed cancels out. */
export function pairRatio(ours: readonly number[], theirs: readonly number[]): number {
  return median(ours.map((value, i) => value / (theirs[i] ?? Number.NaN)));
}

/** Without `bound` the row is only reported. */
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

/** `bound`: of the ratio of the pairs. */
export function compare(
  what: string,
  [ours, theirs]: readonly [readonly number[], readonly number[]],
  unit: string,
  relation: "<=" | ">=",
  bound?: number,
): Row {
  const shown = [spread(ours, unit), spread(theirs, unit)] as const;
  const best = relation === "<=" ? Math.min : Math.max;
  return {
    ...rowOf(what, shown, pairRatio(ours, theirs), relation, bound),
    best: best(...ours) / best(...theirs),
    rounds: ours.length,
  };
}

/** `theirs`: what stands beside it. */
export function alone(
  what: string,
  ours: string,
  wanted = "reported",
  met?: boolean,
  theirs = "-",
  rounds?: number,
): Row {
  const row = { what, ours, theirs, ratio: undefined, wanted, met };
  return rounds === undefined ? row : { ...row, rounds };
}

const cellsOf = (
  { what, ours, theirs, ratio, rounds, wanted, met }: Row,
  [yes, no]: readonly [string, string],
): readonly string[] => {
  const judged = met === undefined ? "" : met ? yes : no;
  return [what, ours, theirs, `${ratio ?? ""}`, `${rounds ?? ""}`, wanted, judged];
};

export function printRows(rows: readonly Row[]): void {
  const table = [
    ["what", "ours (min / median / max)", "theirs", "ratio", "rounds", "wanted", "met"],
    ...rows.map((row) => cellsOf(rounded(row), ["yes", "NO"])),
  ];
  const widths = table[0]?.map((_, at) => Math.max(...table.map((row) => row[at]?.length ?? 0)));
  for (const row of table)
    console.log(
      row
        .map((cell, at) => cell.padEnd(widths?.[at] ?? 0))
        .join("  ")
        .trimEnd(),
    );
}

export const rounded = ({ ratio, best, ...row }: Row): Row => ({
  ...row,
  ratio: ratio === undefined ? undefined : Number(ratio.toFixed(3)),
  ...(best === undefined ? {} : { best: Number(best.toFixed(3)) }),
});
