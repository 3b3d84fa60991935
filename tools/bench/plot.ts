import type { Curve } from "./growth/measure.js";

const COLOURS = ["#4477aa", "#ee6677", "#228833", "#b8860b", "#0099bb", "#aa3377"] as const;
const DASHES = ["", "7 3", "2 3"] as const;
/** As wide as can be read on a telephone: the legend is below the plot. */
const WIDTH = 480;
const [LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT] = [62, 54, WIDTH - 92, 300];
const [BOTTOM, LEGEND, ROW] = [TOP + PLOT_HEIGHT, TOP + PLOT_HEIGHT + 74, 17];
/** A line of the legend has 66 characters at most. */
const LEGEND_LINE = /.{1,66}(?:\s|$)/g;

interface Axes {
  /** What size and cost are multiples of. @default those of each curve at its smallest size */
  readonly base?: readonly [number, number];
  readonly cost: string;
  readonly size: string;
  readonly note: string;
}

const GROWTH: Axes = {
  cost: "cost per item, as a multiple of that at the smallest size",
  size: "size, as a multiple of the smallest; dashed: in proportion to it",
  note: "in brackets: the exponent of growth",
};

/**
 * On two logarithmic axes: size and cost, as multiples. The dashed guide is a cost that grows in
 * proportion to the size.
 */
export function plot(title: string, curves: readonly Curve[], axes = GROWTH): string {
  const multiples = (values: readonly number[], base = values[0] ?? Number.NaN) =>
    values.map((value) => Math.log10(value / base));
  const lines = curves.map(({ sizes, costs }) => ({
    xs: multiples(sizes, axes.base?.[0]),
    ys: multiples(costs, axes.base?.[1]),
  }));
  const ys = lines.flatMap((line) => line.ys);
  const right = Math.max(1, Math.ceil(Math.max(...lines.flatMap(({ xs }) => xs))));
  const [low, high] = [
    Math.min(-1, Math.floor(Math.min(...ys))),
    Math.max(1, Math.ceil(Math.max(...ys))),
  ];
  const x = (decade: number) => (LEFT + (decade / right) * PLOT_WIDTH).toFixed(1);
  const y = (decade: number) => (TOP + ((high - decade) / (high - low)) * PLOT_HEIGHT).toFixed(1);

  const decades = (from: number, to: number) =>
    Array.from({ length: to - from + 1 }, (_, i) => from + i);
  const times = (decade: number) =>
    `${Number((10 ** decade).toPrecision(3)).toLocaleString("en")}×`;
  const grid = [
    ...decades(0, right).map(
      (at) =>
        `<line x1="${x(at)}" x2="${x(at)}" y1="${TOP}" y2="${BOTTOM}"/>${text(x(at), BOTTOM + 16, times(at), "middle")}`,
    ),
    ...decades(low, high).map(
      (at) =>
        `<line x1="${LEFT}" x2="${LEFT + PLOT_WIDTH}" y1="${y(at)}" y2="${y(at)}"/>${text(LEFT - 8, Number(y(at)) + 4, times(at), "end")}`,
    ),
  ];
  let below = LEGEND;
  const drawn = lines.map((line, i) => {
    const colour = COLOURS[i % COLOURS.length] ?? "";
    const dash = DASHES[Math.floor(i / COLOURS.length) % DASHES.length] ?? "";
    const style = `stroke="${colour}" stroke-width="2" stroke-dasharray="${dash}" fill="none"`;
    const points = line.xs.map((px, at) => [x(px), y(line.ys[at] ?? 0)] as const);
    const marks = points.map(
      ([cx, cy]) => `<circle cx="${cx}" cy="${cy}" r="3" fill="${colour}"/>`,
    );
    const sample = `<line x1="14" x2="38" y1="${below}" y2="${below}" ${style}/>`;
    const legend = (curves[i]?.name.match(LEGEND_LINE) ?? []).map((words, row) =>
      text(46, below + 4 + row * ROW, words.trim()),
    );
    below += legend.length * ROW;
    return `<polyline points="${points.join(" ")}" ${style}/>${marks.join("")}\n${sample}${legend.join("")}`;
  });
  const guide = Math.min(right, high);
  const height = below + 4;
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${height}" width="${WIDTH}" height="${height}" font-family="sans-serif" font-size="12"><title>${escapeXml(title)}: how the costs grow</title>
<style>.paper{fill:#fff}text{fill:#222}.grid line{stroke:#ddd}.guide{stroke:#777}@media (prefers-color-scheme:dark){.paper{fill:#14171c}text{fill:#ddd}.grid line{stroke:#363b44}.guide{stroke:#999}}</style>
<rect class="paper" width="100%" height="100%"/>${text(14, 18, title)}${text(14, 36, axes.cost)}${text(14, LEGEND - 16, axes.note)}
<g class="grid">${grid.join("")}</g>${text(LEFT + PLOT_WIDTH / 2, BOTTOM + 36, axes.size, "middle")}
<line class="guide" x1="${x(0)}" y1="${y(0)}" x2="${x(guide)}" y2="${y(guide)}" stroke-dasharray="4 4"/>
${drawn.join("\n")}
</svg>
`;
}

const text = (x: number | string, y: number, words: string, anchor = "start") =>
  `<text x="${x}" y="${y}" text-anchor="${anchor}">${escapeXml(words)}</text>`;

const escapeXml = (words: string) => words.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
