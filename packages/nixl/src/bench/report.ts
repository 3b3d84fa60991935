import { z } from "zod";

const spreadSchema = z.object({ min: z.number(), median: z.number(), max: z.number() });
/** The least, median and largest of several measurements. */
export type Spread = z.infer<typeof spreadSchema>;

const benchRowSchema = z.object({
  operation: z.enum(["READ", "WRITE"]),
  sizeBytes: z.int().describe("Bytes of one transfer."),
  blockBytes: z.int().describe("Bytes of one descriptor."),
  order: z
    .enum(["contiguous", "scattered"])
    .describe("Order of the blocks; adjacent blocks are merged."),
  rounds: z.int(),
  prepareMs: spreadSchema.describe(
    "From the call to the first post, and the time to make the later requests.",
  ),
  postMs: spreadSchema.describe(
    "Inside the post calls. Nearly everything where the post is the copy.",
  ),
  transferMs: spreadSchema.describe("From the first post to the last byte."),
  totalMs: spreadSchema.describe("From the call until the promise has settled."),
  gigabytesPerSecond: spreadSchema.describe("Computed from totalMs, in units of 10^9 bytes."),
  consistent: z
    .boolean()
    .nullable()
    .describe("Whether SHA-256 of both sides is equal after the transfer; null: not checked."),
});
/** One combination of a benchmark. Times are in ms. */
export type BenchRow = z.infer<typeof benchRowSchema>;

/** The zod schema of what `kv-nixl bench --json` prints. */
export const benchReportSchema = z.object({
  version: z.literal(1),
  target: z.string(),
  backends: z.array(z.string()),
  rows: z.array(benchRowSchema),
});
/** The result of a benchmark. */
export type BenchReport = z.infer<typeof benchReportSchema>;

/** The spread of the values; NaN for none. */
export function spreadOf(values: readonly number[]): Spread {
  const sorted = [...values].sort((a, b) => a - b);
  const at = (place: number) => sorted[place] ?? Number.NaN;
  const middle = sorted.length >> 1;
  const median = sorted.length % 2 === 1 ? at(middle) : (at(middle - 1) + at(middle)) / 2;
  return { min: at(0), median, max: at(sorted.length - 1) };
}

/** A number of bytes as text, such as "64 KiB". */
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

/** The report as a table for people. Columns without other labels are medians. */
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
