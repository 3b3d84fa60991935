import { WAYS } from "../ways.js";
import { nameOf } from "../workload.js";
import type { Measured } from "./measure.js";

const COLOURS = ["#4477aa", "#ee6677", "#228833"] as const;
const WIDTH = 900;
const LABEL = 330;
const ROW = 54;

/** An SVG with a bar for each way of transfer at each point, and a line at the bound. */
export function plot(measured: readonly Measured[]): string {
  const largest = Math.max(...measured.flatMap(({ ttftMs }) => WAYS.map((way) => ttftMs[way])));
  const x = (ms: number) => LABEL + (ms / largest) * (WIDTH - LABEL - 70);
  const height = measured.length * ROW + 50;
  const rows = measured.flatMap(({ point, ttftMs, boundMs, localMs }, index) => {
    const top = 40 + index * ROW;
    const bars = WAYS.map((way, i) => {
      const ms = ttftMs[way];
      const y = top + i * 14;
      return `<rect x="${LABEL}" y="${y}" width="${(x(ms) - LABEL).toFixed(1)}" height="12" fill="${COLOURS[i]}"/><text x="${(x(ms) + 4).toFixed(1)}" y="${y + 10}">${ms.toFixed(1)}</text>`;
    });
    const at = x(localMs ?? boundMs).toFixed(1);
    return [
      `<text x="${LABEL - 8}" y="${top + 24}" text-anchor="end">${nameOf(point)}</text>`,
      ...bars,
      `<line x1="${at}" x2="${at}" y1="${top - 3}" y2="${top + 43}" stroke="#000" stroke-dasharray="3 2"/>`,
    ];
  });
  const legend = WAYS.map(
    (way, i) =>
      `<rect x="${LABEL + i * 150}" y="10" width="12" height="12" fill="${COLOURS[i]}"/><text x="${LABEL + 18 + i * 150}" y="20">${way}</text>`,
  );
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${WIDTH}" height="${height}" font-family="sans-serif" font-size="11"><title>Time to first token by push and by pull</title><rect width="100%" height="100%" fill="#fff"/>${legend.join("")}<text x="10" y="20">TTFT, ms; dashed: the bound</text>
${rows.join("\n")}
</svg>
`;
}
