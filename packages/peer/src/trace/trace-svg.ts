import { type RequestTrace, timeShares } from "./request-trace.js";
import { detailOf, milliseconds, shownEndMs } from "./trace-text.js";

const COLOURS = ["#3465a4", "#c17d11", "#4e9a06", "#75507b", "#cc0000", "#06989a"];
const ROW = 22;
const NAMES_WIDTH = 290;
const BARS_WIDTH = 640;
const WIDTH = 1280;
const TICKS = 5;
const LEGENDS_PER_ROW = 4;

/** A request as an SVG document: one row for each span, coloured by process, and the share of each process. */
export function traceSvg(trace: RequestTrace): string {
  const { spans, startMs, endMs, requestId, traceId } = trace;
  const processes = [...new Set(spans.map(({ process }) => process))];
  const colourOf = (process: string) => COLOURS[processes.indexOf(process) % COLOURS.length] ?? "#555753";
  const shownMs = shownEndMs(trace) - startMs;
  const x = (ms: number) => NAMES_WIDTH + Math.max(0, Math.min(1, (ms - startMs) / shownMs)) * BARS_WIDTH;
  const top = 76 + 20 * Math.ceil(processes.length / LEGENDS_PER_ROW);
  const height = top + spans.length * ROW + 30;

  const legend = processes.map((process, index) => {
    const ms = timeShares(trace).reduce((sum, share) => sum + (share.process === process ? share.ms : 0), 0);
    const at = 16 + (index % LEGENDS_PER_ROW) * 300;
    const y = 46 + 20 * Math.floor(index / LEGENDS_PER_ROW);
    return (
      `<rect x="${at}" y="${y}" width="12" height="12" fill="${colourOf(process)}"/>` +
      `<text x="${at + 18}" y="${y + 11}">${escaped(process)}: ${milliseconds(ms)}</text>`
    );
  });
  const axis = Array.from({ length: TICKS + 1 }, (_, index) => {
    const ms = (shownMs * index) / TICKS;
    const at = x(startMs + ms).toFixed(1);
    return (
      `<line x1="${at}" y1="${top - 8}" x2="${at}" y2="${height - 24}" stroke="#d3d7cf"/>` +
      `<text x="${at}" y="${top - 14}" text-anchor="middle" fill="#555753">${milliseconds(ms)}</text>`
    );
  });
  const answered = x(endMs).toFixed(1);
  const rows = spans.map((span, index) => {
    const y = top + index * ROW;
    const from = x(span.startMs);
    const width = Math.max(2, x(span.endMs) - from);
    const colour = colourOf(span.process);
    const fill = span.error !== undefined ? "#ef2929" : colour;
    const opacity = span.isBackground ? ' fill-opacity="0.35"' : "";
    const detail = [milliseconds(span.endMs - span.startMs), detailOf(span)].filter(Boolean).join(", ");
    const events = span.events
      .filter(({ atMs }) => atMs <= shownEndMs(trace))
      .map(
        ({ name, atMs }) =>
          `<circle cx="${x(atMs).toFixed(1)}" cy="${y + 9}" r="3.5" fill="#fff" stroke="${colour}"><title>${escaped(name)}</title></circle>`,
      );
    const labelX = NAMES_WIDTH + BARS_WIDTH + 10;
    return (
      `<text x="${16 + span.depth * 14}" y="${y + 13}">${escaped(span.name)}</text>` +
      `<rect x="${from.toFixed(1)}" y="${y + 2}" width="${width.toFixed(1)}" height="14" rx="2" fill="${fill}"${opacity}><title>${escaped(`${span.process} ${span.name} ${detail}`)}</title></rect>` +
      events.join("") +
      `<text x="${labelX}" y="${y + 13}" fill="#555753">${escaped(detail.slice(0, 48))}</text>`
    );
  });
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${WIDTH}" height="${height}" viewBox="0 0 ${WIDTH} ${height}" font-family="sans-serif" font-size="12" fill="#2e3436">`,
    `<rect width="${WIDTH}" height="${height}" fill="#fff"/>`,
    `<text x="16" y="26" font-size="15">request ${escaped(requestId ?? "unknown")}: ${milliseconds(endMs - startMs)}</text>`,
    `<text x="${WIDTH - 16}" y="26" text-anchor="end" fill="#888a85">trace ${traceId}</text>`,
    ...legend,
    ...axis,
    ...rows,
    `<line x1="${answered}" y1="${top - 8}" x2="${answered}" y2="${height - 24}" stroke="#2e3436" stroke-dasharray="4 3"/>`,
    `<text x="${answered}" y="${height - 8}" text-anchor="middle" fill="#555753">answered</text>`,
    "</svg>",
    "",
  ].join("\n");
}

function escaped(text: string): string {
  return text
    .replaceAll("&", "&amp;")
    .replaceAll("<", "&lt;")
    .replaceAll(">", "&gt;")
    .replaceAll('"', "&quot;")
    .replace(/[^\P{C}]/gu, "?");
}
