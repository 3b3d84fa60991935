import type { MeasuredGroup } from "./quantity.js";

const COLOURS = ["#4477aa", "#ee6677", "#228833", "#b8860b", "#0099bb", "#aa3377"] as const;
const DASHES = ["", "7 3", "2 3"] as const;
/** As wide as can be read on a telephone: the legend is below the plot. */
const WIDTH = 480;
const LEFT = 62;
const TOP = 54;
const PLOT_WIDTH = WIDTH - LEFT - 30;
const PLOT_HEIGHT = 300;
const LEGEND = TOP + PLOT_HEIGHT + 74;
const ROW = 17;
/** The most characters of a line of the legend. */
const CHARACTERS = 66;

/**
 * An SVG with a line per quantity on two logarithmic axes: the size, and the cost per item, both as
 * multiples of those at the smallest size. A constant cost is level; the dashed guide is a cost
 * that grows in proportion to the size.
 */
export function plot({ title, quantities }: MeasuredGroup): string {
  const lines = quantities.map(({ name, sizes, costs, growth }) => ({
    name: `${name} (${growth.toFixed(2)})`,
    points: sizes.map((size, i) => [ratio(size, sizes[0]), ratio(costs[i], costs[0])] as const),
  }));
  const all = lines.flatMap(({ points }) => points);
  const decades = Math.max(1, Math.ceil(Math.log10(Math.max(...all.map(([x]) => x)))));
  const bottom = Math.min(-1, Math.floor(Math.log10(Math.min(...all.map(([, y]) => y)))));
  const top = Math.max(1, Math.ceil(Math.log10(Math.max(...all.map(([, y]) => y)))));
  const x = (value: number) => fixed(LEFT + (Math.log10(value) / decades) * PLOT_WIDTH);
  const y = (value: number) =>
    fixed(TOP + ((top - Math.log10(value)) / (top - bottom)) * PLOT_HEIGHT);
  const legends = lines.map(({ name }) => wrapped(name));
  /** The first row of each line's legend. */
  const rowOf = (i: number) => legends.slice(0, i).reduce((sum, rows) => sum + rows.length, 0);
  const height = LEGEND + rowOf(lines.length) * ROW + 4;
  const powers = (from: number, to: number) =>
    Array.from({ length: to - from + 1 }, (_, i) => 10 ** (from + i));
  const grid = [
    ...powers(0, decades).map(
      (value) =>
        `<line x1="${x(value)}" x2="${x(value)}" y1="${TOP}" y2="${TOP + PLOT_HEIGHT}"/><text x="${x(value)}" y="${TOP + PLOT_HEIGHT + 16}" text-anchor="middle">${times(value)}</text>`,
    ),
    ...powers(bottom, top).map(
      (value) =>
        `<line x1="${LEFT}" x2="${LEFT + PLOT_WIDTH}" y1="${y(value)}" y2="${y(value)}"/><text x="${LEFT - 8}" y="${Number(y(value)) + 4}" text-anchor="end">${times(value)}</text>`,
    ),
  ];
  const guideEnd = Math.min(10 ** decades, 10 ** top);
  const curves = lines.map(({ points }, i) => {
    const colour = COLOURS[i % COLOURS.length] ?? "";
    const dash = DASHES[Math.floor(i / COLOURS.length) % DASHES.length] ?? "";
    const style = `stroke="${colour}" stroke-width="2" stroke-dasharray="${dash}" fill="none"`;
    const legendY = LEGEND + rowOf(i) * ROW;
    const marks = points.map(
      ([px, py]) => `<circle cx="${x(px)}" cy="${y(py)}" r="3" fill="${colour}"/>`,
    );
    const texts = (legends[i] ?? []).map(
      (text, row) => `<text x="46" y="${legendY + 4 + row * ROW}">${escapeXml(text)}</text>`,
    );
    return `<polyline points="${points.map(([px, py]) => `${x(px)},${y(py)}`).join(" ")}" ${style}/>${marks.join("")}
<line x1="14" x2="38" y1="${legendY}" y2="${legendY}" ${style}/>${texts.join("")}`;
  });
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${height}" width="${WIDTH}" height="${height}" font-family="sans-serif" font-size="12"><title>${escapeXml(title)}: how the costs grow</title>
<style>.paper{fill:#fff}text{fill:#222}.grid line{stroke:#ddd}.guide{stroke:#777}@media (prefers-color-scheme:dark){.paper{fill:#14171c}text{fill:#ddd}.grid line{stroke:#363b44}.guide{stroke:#999}}</style>
<rect class="paper" width="100%" height="100%"/><text x="14" y="18" font-size="13" font-weight="bold">${escapeXml(title)}</text><text x="14" y="36">cost per item, as a multiple of that at the smallest size</text><text x="14" y="${LEGEND - 16}">in brackets: the exponent of growth</text>
<g class="grid">${grid.join("")}</g><text x="${LEFT + PLOT_WIDTH / 2}" y="${TOP + PLOT_HEIGHT + 36}" text-anchor="middle">size, as a multiple of the smallest; dashed: in proportion to it</text>
<line class="guide" x1="${x(1)}" y1="${y(1)}" x2="${x(guideEnd)}" y2="${y(guideEnd)}" stroke-dasharray="4 4"/>
${curves.join("\n")}
</svg>
`;
}

/** Lines of at most so many characters. */
function wrapped(text: string): string[] {
  const lines: string[] = [""];
  for (const word of text.split(" ")) {
    const last = lines.at(-1) ?? "";
    if (last.length + word.length < CHARACTERS) lines[lines.length - 1] = `${last} ${word}`.trim();
    else lines.push(word);
  }
  return lines;
}

function ratio(value = Number.NaN, smallest = Number.NaN): number {
  return value / smallest;
}

function fixed(value: number): string {
  return value.toFixed(1);
}

function times(value: number): string {
  return `${value >= 1 ? value.toLocaleString("en") : Number(value.toPrecision(3))}×`;
}

function escapeXml(text: string): string {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}
