import type { PairReport, PlanReport } from "../report/report.js";
import { holdsLatents, showBytes, showHeads, showPrefillRank } from "./format.js";

const ROW = 44;
const BOX = { width: 190, height: 32 };
const LEFT = 20;
const RIGHT = 520;
const TOP = 64;

type PlacedRank = Parameters<typeof showPrefillRank>[0];

/** The pair as an SVG without scripts and external resources: prefill ranks on the left, decode ranks on the right, a curve per read. */
export function renderSvg(report: PairReport): string {
  return report.outcome === "planned" ? planned(report) : refused(report.reason);
}

/** A colour per prefill rank, by its place among them, spread over the wheel so that neighbours differ. */
function colourOf(rank: number): string {
  return `hsl(${Math.round((rank * 137.508) % 360)} 60% 45%)`;
}

function planned(report: PlanReport): string {
  const stages = report.stages.length;
  const nameOf = (rank: PlacedRank) => showPrefillRank(rank, stages);
  const indexOf = (rank: PlacedRank) =>
    report.notifications.findIndex(
      ({ prefillRank, prefillStage }) =>
        prefillRank === rank.prefillRank && prefillStage === rank.prefillStage,
    );
  const rows = Math.max(report.notifications.length, report.ranks.length);
  const height = TOP + rows * ROW + 20;
  const isMla = holdsLatents(report.groups);
  const heads = (range: readonly [number, number]) => (isMla ? "latent" : `heads ${showHeads(range)}`);
  const shift = (count: number) => TOP + ((rows - count) * ROW) / 2;
  const y = (index: number, count: number) => shift(count) + index * ROW + BOX.height / 2;
  const boxes = [
    ...report.notifications.map((rank, index) =>
      box(
        LEFT,
        y(index, report.notifications.length),
        nameOf(rank),
        `awaits ${rank.awaits}`,
        colourOf(index),
      ),
    ),
    ...report.ranks.map((rank, index) =>
      box(RIGHT, y(index, report.ranks.length), `D${rank.decodeRank}`, heads(rank.heads), "#555"),
    ),
  ];
  const curves = report.ranks.flatMap((rank, index) => {
    const to = y(index, report.ranks.length);
    const reads = rank.reads.map((read) => {
      const from = y(indexOf(read), report.notifications.length);
      const title = `D${rank.decodeRank} reads ${heads(read.heads)} from ${nameOf(read)}: ${showBytes(read.lengthBytes)}, ${read.merged} runs`;
      return curve(from, to, colourOf(indexOf(read)), title, "");
    });
    const notices = rank.notifyOnly.map((notified) => {
      const from = y(indexOf(notified), report.notifications.length);
      return curve(
        from,
        to,
        "#999",
        `D${rank.decodeRank} only notifies ${nameOf(notified)}`,
        ' stroke-dasharray="4 4"',
      );
    });
    return [...reads, ...notices];
  });
  const caption = `${showBytes(report.request.lengthBytes)} for ${report.request.numTokens} tokens, form ${report.form}`;
  return page(RIGHT + BOX.width + LEFT, height, [
    text(LEFT, 26, report.title, 16),
    text(LEFT, 46, caption, 12),
    ...curves,
    ...boxes,
  ]);
}

function refused(reason: string): string {
  return page(900, 80, [text(LEFT, 30, "refused", 16), text(LEFT, 54, reason, 12)]);
}

function box(x: number, middle: number, name: string, what: string, colour: string): string {
  const y = middle - BOX.height / 2;
  return (
    `<g data-rank="${name}"><rect x="${x}" y="${y}" width="${BOX.width}" height="${BOX.height}" rx="5" fill="white" stroke="${colour}" stroke-width="2"/>` +
    `${text(x + 10, middle + 5, name, 14)}${text(x + 75, middle + 4, what, 11)}</g>`
  );
}

function curve(from: number, to: number, colour: string, title: string, dash: string): string {
  const [begin, end] = [LEFT + BOX.width, RIGHT];
  const middle = (begin + end) / 2;
  return (
    `<path d="M ${begin} ${from} C ${middle} ${from}, ${middle} ${to}, ${end} ${to}" fill="none" stroke="${colour}" stroke-width="2"${dash}>` +
    `<title>${escapeXml(title)}</title></path>`
  );
}

function text(x: number, y: number, content: string, size: number): string {
  return `<text x="${x}" y="${y}" font-family="sans-serif" font-size="${size}" fill="#222">${escapeXml(content)}</text>`;
}

function page(width: number, height: number, content: readonly string[]): string {
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img">\n${content.join("\n")}\n</svg>\n`;
}

export function escapeXml(value: string): string {
  return value
    .replaceAll("&", "&amp;")
    .replaceAll("<", "&lt;")
    .replaceAll(">", "&gt;")
    .replaceAll('"', "&quot;");
}
