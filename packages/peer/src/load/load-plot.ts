import { escapeXml, roundTicks, svgDocument, SVG_WIDTH as WIDTH } from "../svg.js";
import type { LoadResult } from "./load.js";
import type { PromptResult } from "./prompt-runner.js";

const PANEL_HEIGHT = 180;
const LEFT = 58;
const RIGHT = 14;
const TOP = 90;
const GAP = 62;
const COLOURS = { ok: "#2f9e77", aborted: "#c98a00", failed: "#e0554a" } as const;

/**
 * Draws the latencies over time as an SVG document: one panel for prefill, one for reads, one dot
 * per request, coloured by outcome. It has a dark form.
 */
export function loadPlot({ pulls, elapsedMs, leaks }: LoadResult, title: string): string {
  const height = TOP + 2 * PANEL_HEIGHT + GAP + 86;
  const spanMs = Math.max(elapsedMs, 1);
  const x = (ms: number) => LEFT + (Math.min(ms, spanMs) / spanMs) * (WIDTH - LEFT - RIGHT);
  const panels = [
    panel("prefill, ms", TOP, pulls, ({ prefillMs }) => (prefillMs > 0 ? prefillMs : undefined), x),
    panel("read, ms", TOP + PANEL_HEIGHT + GAP, pulls, ({ pullMs }) => pullMs, x),
  ];
  const axisY = TOP + 2 * PANEL_HEIGHT + GAP + 18;
  const seconds = roundTicks(spanMs / 1000).map(
    (second) =>
      `<text class="soft" x="${x(second * 1000).toFixed(1)}" y="${axisY}" text-anchor="middle">${second.toLocaleString("en")}</text>`,
  );
  const legend = Object.entries(COLOURS).map(
    ([name, colour], index) =>
      `<circle cx="${LEFT + 4 + index * 85}" cy="44" r="4" fill="${colour}"/><text x="${LEFT + 14 + index * 85}" y="48">${name}</text>`,
  );
  const foot =
    leaks === undefined
      ? ["blocks of the server: unknown"]
      : [
          `blocks of the server in use: ${leaks.before} before, ${leaks.afterTold} after,`,
          `${leaks.atEnd} at the end; ${leaks.leaked} leaked`,
        ];
  return svgDocument(height, [
    `<text x="${LEFT}" y="24" font-size="14">${escapeXml(title.length > 56 ? `${title.slice(0, 55)}…` : title)}</text>`,
    ...legend,
    ...panels,
    ...seconds,
    `<text class="soft" x="${LEFT}" y="${axisY + 18}">seconds; ${(spanMs / 1000).toFixed(1)} s in all</text>`,
    ...foot.map((line, index) => `<text x="${LEFT}" y="${axisY + 38 + index * 16}">${line}</text>`),
  ]);
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
  const ticks = roundTicks(most).map((tick) => {
    const at = y(tick).toFixed(1);
    return (
      `<line class="grid" x1="${LEFT}" y1="${at}" x2="${WIDTH - RIGHT}" y2="${at}"/>` +
      `<text class="soft" x="${LEFT - 8}" y="${at}" text-anchor="end" dominant-baseline="middle">${tick.toLocaleString("en")}</text>`
    );
  });
  const dots = pulls.map((pull) => {
    const value = latencyOf(pull);
    // A request without a latency is drawn on the axis, so that it is visible.
    const cy = y(value ?? 0).toFixed(1);
    const silent = pull.fault === "no-notify" ? ' class="mark" stroke-width="1.5"' : "";
    const label = `${pull.promptTokens} tokens, ${value?.toFixed(1) ?? "no"} ms${pull.code === undefined ? "" : `, ${pull.code}`}`;
    return `<circle cx="${x(pull.startMs).toFixed(1)}" cy="${cy}" r="3" fill="${COLOURS[pull.outcome]}"${silent}><title>${escapeXml(label)}</title></circle>`;
  });
  return [`<text x="${LEFT}" y="${top - 14}">${name}</text>`, ...ticks, ...dots].join("\n");
}
