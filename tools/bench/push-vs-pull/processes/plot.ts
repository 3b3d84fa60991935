import { type Measured, WAYS } from "../ways.js";
import { nameOf } from "../workload.js";

const COLOURS = ["#4477aa", "#ee6677", "#228833"] as const;
/** As wide as can be read on a telephone: a point's name is above its bars. */
const WIDTH = 480;
const LEFT = 14;
const ROW = 68;

/**
 * An SVG with a bar for each way of transfer at each point, and a line at the bound. It has a dark
 * form.
 */
export function plot(measured: readonly Measured[]): string {
  const largest = Math.max(...measured.flatMap(({ ttftMs }) => WAYS.map((way) => ttftMs[way])));
  const x = (ms: number) => LEFT + (ms / largest) * (WIDTH - LEFT - 54);
  const top = 56;
  const height = measured.length * ROW + top + 4;
  const rows = measured.flatMap(({ point, ttftMs, boundMs, localMs }, index) => {
    const y = top + index * ROW;
    const bars = WAYS.map((way, i) => {
      const ms = ttftMs[way];
      const at = y + 18 + i * 14;
      return `<rect x="${LEFT}" y="${at}" width="${(x(ms) - LEFT).toFixed(1)}" height="12" fill="${COLOURS[i]}"/><text x="${(x(ms) + 4).toFixed(1)}" y="${at + 10}">${ms.toFixed(1)}</text>`;
    });
    const at = x(localMs ?? boundMs).toFixed(1);
    return [
      `<text x="${LEFT}" y="${y + 12}">${nameOf(point)}</text>`,
      ...bars,
      `<line x1="${at}" x2="${at}" y1="${y + 16}" y2="${y + 62}" stroke-dasharray="3 2"/>`,
    ];
  });
  const legend = WAYS.map(
    (way, i) =>
      `<rect x="${LEFT + i * 110}" y="30" width="12" height="12" fill="${COLOURS[i]}"/><text x="${LEFT + 18 + i * 110}" y="40">${way}</text>`,
  );
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${height}" width="${WIDTH}" height="${height}" font-family="sans-serif" font-size="12"><title>Time to first token by push and by pull</title>
<style>.paper{fill:#fff}text{fill:#222}line{stroke:#222}@media (prefers-color-scheme:dark){.paper{fill:#14171c}text{fill:#ddd}line{stroke:#ddd}}</style>
<rect class="paper" width="100%" height="100%"/>${legend.join("")}<text x="${LEFT}" y="20">TTFT, ms; dashed: the bound</text>
${rows.join("\n")}
</svg>
`;
}
