import type { BenchReport, Spread } from "../reports.js";

/** NaN for no values. */
export function spreadOf(values: readonly number[]): Spread {
  const sorted = [...values].sort((a, b) => a - b);
  const at = (place: number) => sorted[place] ?? Number.NaN;
  const middle = sorted.length >> 1;
  const median = sorted.length % 2 === 1 ? at(middle) : (at(middle - 1) + at(middle)) / 2;
  return { min: at(0), median, max: at(sorted.length - 1) };
}

/** Such as "64 KiB". */
export function sizeText(bytes: number): string {
  const units: [bytes: number, name: string][] = [
    [2 ** 30, "GiB"],
    [2 ** 20, "MiB"],
    [2 ** 10, "KiB"],
  ];
  const unit = units.find(([size]) => bytes >= size && bytes % size === 0);
  return unit === undefined ? `${bytes} B` : `${bytes / unit[0]} ${unit[1]}`;
}

const round = (value: number) => Number(value.toPrecision(3)).toString();
const HEADINGS = [
  "",
  "size",
  "block",
  "order",
  "prepare ms",
  "post ms",
  "transfer ms",
  "total ms",
  "GB/s min/median/max",
  "same",
];

/** Columns without other labels are medians. */
export function benchTable({ target, backends, rows }: BenchReport): string {
  const table = rows.map((row) => {
    const { min, median, max } = row.gigabytesPerSecond;
    return [
      row.operation,
      sizeText(row.sizeBytes),
      sizeText(row.blockBytes),
      row.order,
      round(row.prepareMs.median),
      round(row.postMs.median),
      round(row.transferMs.median),
      round(row.totalMs.median),
      `${round(min)} / ${round(median)} / ${round(max)}`,
      row.consistent === null ? "-" : row.consistent ? "yes" : "NO",
    ];
  });
  const all = [HEADINGS, ...table];
  const widths = HEADINGS.map((_, column) =>
    Math.max(...all.map((cells) => cells[column]?.length ?? 0)),
  );
  const lines = all.map((cells) =>
    cells
      .map((cell, i) => cell.padEnd(widths[i] ?? 0))
      .join("  ")
      .trimEnd(),
  );
  return `${backends.join(",")}, with ${target}\n${lines.join("\n")}\n`;
}
