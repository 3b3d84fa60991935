import { escapeXml, roundTicks, svgDocument, SVG_WIDTH as WIDTH } from "../svg.js";
import { type RequestTrace, timeShares } from "./request-trace.js";
import { detailOf, milliseconds, shownEndMs } from "./trace-text.js";

const COLOURS = ["#4477aa", "#c17d11", "#4e9a06", "#8b6fc0", "#d0605a", "#06989a"];
const EDGE = 14;
const ROW = 38;
const CHARACTER = 6.4;

/**
 * A request as an SVG document: a bar for each span, coloured by process, and the share of each
 * process. It has a dark form.
 */
export function traceSvg(trace: RequestTrace): string {
  const { spans, startMs, endMs, requestId, traceId } = trace;
  const processes = [...new Set(spans.map(({ process }) => process))];
  const colourOf = (process: string) =>
    COLOURS[processes.indexOf(process) % COLOURS.length] ?? "#777777";
  const shownMs = shownEndMs(trace) - startMs;
  const x = (ms: number) =>
    EDGE + Math.max(0, Math.min(1, (ms - startMs) / shownMs)) * (WIDTH - 2 * EDGE);
  const top = 92 + 18 * processes.length;
  const bottom = top + spans.length * ROW;

  const legend = processes.map((process, index) => {
    const ms = timeShares(trace).reduce(
      (sum, share) => sum + (share.process === process ? share.ms : 0),
      0,
    );
    const y = 58 + 18 * index;
    return (
      `<rect x="${EDGE}" y="${y}" width="11" height="11" fill="${colourOf(process)}"/>` +
      `<text x="${EDGE + 18}" y="${y + 10}">${escapeXml(process)}: ${milliseconds(ms)}</text>`
    );
  });
  const axis = roundTicks(shownMs).map((ms) => {
    const at = x(startMs + ms).toFixed(1);
    return `<line class="grid" x1="${at}" y1="${top - 8}" x2="${at}" y2="${bottom}"/>${label(x(startMs + ms), top - 14, `${ms.toLocaleString("en")} ms`)}`;
  });
  const answered = x(endMs);
  const rows = spans.map((span, index) => {
    const y = top + index * ROW;
    const from = x(span.startMs);
    const width = Math.max(2, x(span.endMs) - from);
    const colour = colourOf(span.process);
    const fill = span.error !== undefined ? "#e5484d" : colour;
    const opacity = span.isBackground ? ' fill-opacity="0.4"' : "";
    const detail = [milliseconds(span.endMs - span.startMs), detailOf(span)]
      .filter(Boolean)
      .join(", ");
    const events = span.events
      .filter(({ atMs }) => atMs <= shownEndMs(trace))
      .map(
        ({ name, atMs }) =>
          `<circle class="paper" cx="${x(atMs).toFixed(1)}" cy="${y + 26}" r="3.5" stroke="${colour}"><title>${escapeXml(name)}</title></circle>`,
      );
    const indent = EDGE + Math.min(span.depth, 8) * 10;
    const room = Math.floor((WIDTH - EDGE - indent) / CHARACTER) - span.name.length - 2;
    const shown = detail.length > room ? `${detail.slice(0, Math.max(0, room - 1))}…` : detail;
    return (
      `<text x="${indent}" y="${y + 14}">${escapeXml(span.name)}<tspan class="soft" dx="8">${escapeXml(shown)}</tspan></text>` +
      `<rect x="${from.toFixed(1)}" y="${y + 20}" width="${width.toFixed(1)}" height="12" rx="2" fill="${fill}"${opacity}><title>${escapeXml(`${span.process} ${span.name} ${detail}`)}</title></rect>` +
      events.join("")
    );
  });
  const height = bottom + 26;
  return svgDocument(height, [
    `<text x="${EDGE}" y="24" font-size="14">request ${escapeXml(requestId ?? "unknown")}: ${milliseconds(endMs - startMs)}</text>`,
    `<text class="soft" x="${EDGE}" y="42">trace ${traceId}</text>`,
    ...legend,
    ...axis,
    ...rows,
    `<line class="mark" x1="${answered.toFixed(1)}" y1="${top - 8}" x2="${answered.toFixed(1)}" y2="${bottom}" stroke-dasharray="4 3"/>`,
    label(answered, height - 10, "answered"),
  ]);
}

function label(at: number, y: number, text: string): string {
  const half = (text.length * CHARACTER) / 2;
  const x = Math.min(Math.max(at, EDGE / 2 + half), WIDTH - EDGE / 2 - half);
  return `<text class="soft" x="${x.toFixed(1)}" y="${y}" text-anchor="middle">${text}</text>`;
}
