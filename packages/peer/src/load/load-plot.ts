import type { LoadResult } from "./load.js";
import type { PromptResult } from "./prompt-runner.js";

const WIDTH = 900;
const PANEL_HEIGHT = 220;
const LEFT = 70;
const RIGHT = 20;
const TOP = 40;
const GAP = 50;
const COLOURS = { ok: "#1b7f5c", aborted: "#c98a00", failed: "#c0392b" } as const;

/** Draws the latencies over time as an SVG document: one panel for prefill, one for reads, one dot per request, coloured by outcome. */
export function loadPlot({ pulls, elapsedMs, leaks }: LoadResult, title: string): string {
  const height = TOP + 2 * (PANEL_HEIGHT + GAP) + 20;
  const spanMs = Math.max(elapsedMs, 1);
  const x = (ms: number) => LEFT + (Math.min(ms, spanMs) / spanMs) * (WIDTH - LEFT - RIGHT);
  const panels = [
    panel("prefill, ms", TOP, pulls, ({ prefillMs }) => (prefillMs > 0 ? prefillMs : undefined), x),
    panel("read, ms", TOP + PANEL_HEIGHT + GAP, pulls, ({ pullMs }) => pullMs, x),
  ];
  const legend = Object.entries(COLOURS).map(
    ([name, colour], index) =>
      `<circle cx="${WIDTH - 260 + index * 85}" cy="20" r="4" fill="${colour}"/><text x="${WIDTH - 250 + index * 85}" y="24">${name}</text>`,
  );
  const foot =
    leaks === undefined
      ? "blocks of the server: unknown"
      : `blocks of the server in use: ${leaks.before} before, ${leaks.afterTold} after, ${leaks.atEnd} at the end; ${leaks.leaked} leaked`;
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${WIDTH}" height="${height}" viewBox="0 0 ${WIDTH} ${height}" font-family="sans-serif" font-size="12">`,
    `<rect width="100%" height="100%" fill="#fff"/>`,
    `<text x="${LEFT}" y="24" font-size="14">${escaped(title)}</text>`,
    ...legend,
    ...panels,
    `<text x="${LEFT}" y="${height - 12}">${(spanMs / 1000).toFixed(1)} s in all; ${foot}</text>`,
    "</svg>",
    "",
  ].join("\n");
}

function panel(
  name: string,
  top: number,
  pulls: readonly PromptResult[],
  latencyOf: (pull: PromptResult) => number | undefined,
  x: (ms: number) => number,
): string {
  const most = Math.max(1, ...pulls.map((pull) => latencyOf(pull) ?? 0));
  const bottom = top + PANEL_HEIGHT;
  const y = (value: number) => bottom - (value / most) * PANEL_HEIGHT;
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => {
    const at = y(share * most).toFixed(1);
    return (
      `<line x1="${LEFT}" y1="${at}" x2="${WIDTH - RIGHT}" y2="${at}" stroke="#ddd"/>` +
      `<text x="${LEFT - 8}" y="${at}" text-anchor="end" dominant-baseline="middle">${(share * most).toFixed(1)}</text>`
    );
  });
  const dots = pulls.map((pull) => {
    const value = latencyOf(pull);
    // A request without a latency is drawn on the axis, so that it is visible.
    const cy = y(value ?? 0).toFixed(1);
    const silent = pull.fault === "no-notify" ? ' stroke="#333" stroke-width="1.5"' : "";
    const label = `${pull.promptTokens} tokens, ${value?.toFixed(1) ?? "no"} ms${pull.code === undefined ? "" : `, ${pull.code}`}`;
    return `<circle cx="${x(pull.startMs).toFixed(1)}" cy="${cy}" r="3" fill="${COLOURS[pull.outcome]}"${silent}><title>${escaped(label)}</title></circle>`;
  });
  return [`<text x="${LEFT}" y="${top - 8}">${name}</text>`, ...ticks, ...dots].join("\n");
}

function escaped(text: string): string {
  return text.replace(/[<>&"]/g, (character) => `&#${character.charCodeAt(0)};`);
}
