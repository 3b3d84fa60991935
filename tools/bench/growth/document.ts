import { readFile, writeFile } from "node:fs/promises";
import { loadavg } from "node:os";
import { plot } from "./plot.js";
import type { Measured, MeasuredGroup } from "./quantity.js";

const DOCS = new URL("../../../docs/bench/", import.meta.url);

/**
 * Writes the group's plot, and its table between its two marks in docs/bench/growth.md. The text
 * around them is written by hand.
 */
export async function publish(group: MeasuredGroup): Promise<void> {
  const page = new URL("growth.md", DOCS);
  const text = await readFile(page, "utf8");
  const [begin, end] = [`<!-- ${group.name}: begin -->`, `<!-- ${group.name}: end -->`];
  const [from, to] = [text.indexOf(begin), text.indexOf(end)];
  if (from < 0 || to < from) throw new Error(`docs/bench/growth.md has no ${begin} before ${end}`);
  await writeFile(new URL(`growth-${group.name}.svg`, DOCS), plot(group));
  await writeFile(
    page,
    `${text.slice(0, from + begin.length)}\n\n${section(group)}\n${text.slice(to)}`,
  );
}

function section(group: MeasuredGroup): string {
  const rows = group.quantities.map(row);
  return `| what | sizes | cost at each size | exponent | wanted | |
| --- | --- | --- | ---: | ---: | --- |
${rows.join("\n")}

![${group.title}: how the costs grow](growth-${group.name}.svg)

Measured on ${new Date().toISOString().slice(0, 10)} with Node.js ${process.versions.node}; load of the machine afterwards: ${(loadavg()[0] ?? 0).toFixed(1)}.
`;
}

function row({ name, sizeOf, sizes, costs, unit, growth, exponent, most, met }: Measured): string {
  const limit = most === undefined ? "" : `, ≤ ${most} ${unit}`;
  const cells = [
    name,
    `${sizes.map(showSize).join(", ")} ${sizeOf}`,
    `${costs.map(showCost).join(", ")} ${unit}`,
    growth.toFixed(2),
    `${exponent}${limit}`,
    met ? "met" : "**missed**",
  ];
  return `| ${cells.join(" | ")} |`;
}

/** 1,000 as 1k. */
export function showSize(size: number): string {
  if (size >= 1e6) return `${size / 1e6}M`;
  return size >= 1000 && size % 1000 === 0 ? `${size / 1000}k` : size.toLocaleString("en");
}

/** Three significant digits. */
export function showCost(cost: number): string {
  return Number(cost.toPrecision(3)).toLocaleString("en");
}
