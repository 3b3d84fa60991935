import type { PairReport, PlanReport } from "../report/report.js";
import {
  counted,
  escapeXml,
  holdsLatents,
  showBytes,
  showHeads,
  showPrefillRank,
} from "./format.js";

/** `slide`: beside text or alone on a slide. `narrow`: on a telephone. */
const SHAPES = {
  slide: { width: 960, box: 250, row: 56, name: 16, what: 13 },
  narrow: { width: 350, box: 122, row: 52, name: 14, what: 12 },
} as const;
type Shape = (typeof SHAPES)[keyof typeof SHAPES] & { readonly isNarrow: boolean };

const EDGE = 8;
const BOX_HEIGHT = 44;
const KIND_HEIGHT = 34;
/** The most ranks drawn on a side; more cannot be read. */
const MAX_DRAWN = 64;
const COLOURS = 24;

/** Viewers without style sheets draw the light colours, which are attributes. */
const LIGHT = { ink: "#1f2328", soft: "#57606a", paper: "#ffffff", lightness: 0.4 };
const DARK = { ink: "#e6edf3", soft: "#a5b0bc", paper: "#0d1117", lightness: 0.66 };

export interface SvgOptions {
  /** `narrow`: 350 pixels wide. Default: `slide`. */
  readonly shape?: keyof typeof SHAPES | undefined;
  /** Draws the title. Default: true. */
  readonly titled?: boolean | undefined;
}

type PlacedRank = Parameters<typeof showPrefillRank>[0];

/**
 * The pair without scripts or external resources: prefill ranks left, decode ranks right, a curve
 * per read. Colours follow the reader's choice of dark or light. `data-prefill` and `data-decode`
 * name ranks.
 */
export function renderSvg(
  report: PairReport,
  { shape = "slide", titled = true }: SvgOptions = {},
): string {
  const sized: Shape = { ...SHAPES[shape], isNarrow: shape === "narrow" };
  return report.outcome === "planned" ? planned(report, sized, titled) : refused(report);
}

function planned(report: PlanReport, shape: Shape, titled: boolean): string {
  const { isNarrow, row, width, box } = shape;
  const stages = report.stages.length;
  const nameOf = (rank: PlacedRank) => showPrefillRank(rank, stages);
  const latent = holdsLatents(report.groups);
  const heads = (range: readonly [number, number]) =>
    latent ? "latent" : `${range[1] - range[0] === 1 ? "head" : "heads"} ${showHeads(range)}`;
  const senders = report.notifications.slice(0, MAX_DRAWN);
  const receivers = report.ranks.slice(0, MAX_DRAWN);
  const indexOf = (rank: PlacedRank) =>
    senders.findIndex(
      ({ prefillRank, prefillStage }) =>
        prefillRank === rank.prefillRank && prefillStage === rank.prefillStage,
    );
  const top = (titled ? 64 : 0) + 40;
  const rows = Math.max(senders.length, receivers.length);
  const y = (index: number, count: number) =>
    top + ((rows - count) * row) / 2 + index * row + row / 2;
  const from = { x: EDGE, curve: EDGE + box };
  const to = { x: width - EDGE - box, curve: width - EDGE - box };
  const boxes = [
    ...senders.map((rank, index) => {
      const frees =
        rank.from.length === 0
          ? "not read"
          : isNarrow
            ? `frees after ${rank.awaits}`
            : `frees its blocks after ${counted(rank.awaits, "notice")}`;
      return boxOf(shape, {
        x: from.x,
        middle: y(index, senders.length),
        colour: index,
        data: `data-prefill="${nameOf(rank)}"`,
        name: nameOf(rank),
        right: heads(rank.heads),
        below: frees,
      });
    }),
    ...receivers.map((rank, index) => {
      const sources = rank.reads.length;
      return boxOf(shape, {
        x: to.x,
        middle: y(index, receivers.length),
        data: `data-decode="D${rank.decodeRank}"`,
        name: `D${rank.decodeRank}`,
        right: heads(rank.heads),
        below: isNarrow
          ? showBytes(rank.lengthBytes)
          : `reads ${showBytes(rank.lengthBytes)} from ${counted(sources, "rank")}`,
      });
    }),
  ];
  const curves = receivers.flatMap((rank, index) => {
    const end = y(index, receivers.length);
    const name = `D${rank.decodeRank}`;
    const line = (source: PlacedRank, title: string, isRead: boolean) => {
      const at = indexOf(source);
      if (at < 0) return [];
      const data = `data-prefill="${nameOf(source)}" data-decode="${name}"`;
      return [
        curveOf(from.curve, y(at, senders.length), to.curve, end, {
          data,
          title,
          colour: isRead ? at : undefined,
        }),
      ];
    };
    return [
      ...rank.reads.flatMap((read) =>
        line(
          read,
          `${name} reads ${heads(read.heads)} from ${nameOf(read)}: ${showBytes(read.lengthBytes)} in ${counted(read.merged, "run")}`,
          true,
        ),
      ),
      ...rank.notifyOnly.flatMap((notified) =>
        line(notified, `${name} only notifies ${nameOf(notified)}`, false),
      ),
    ];
  });
  const { request, prefill, decode } = report;
  const sides = [
    { x: EDGE, anchor: "start", side: "Prefill", engine: prefill },
    { x: width - EDGE, anchor: "end", side: "Decode", engine: decode },
  ].map(({ x, anchor, side, engine }) => {
    const stagesText = engine.ppSize > 1 ? ` × PP ${engine.ppSize}` : "";
    const blocks = isNarrow ? "" : `, blocks of ${engine.blockSize} tokens, ${engine.layout}`;
    return text(x, top - 12, `${side} TP ${engine.tpSize}${stagesText}${blocks}`, 13, {
      anchor,
      weight: "bold",
    });
  });
  const left = [
    leftOut(report.notifications.length, "prefill"),
    leftOut(report.ranks.length, "decode"),
  ].filter((line) => line !== undefined);
  const legend = legendOf(report, left, isNarrow ? 46 : 150);
  const kinds = kindsOf(report, shape, top + rows * row + 18);
  const legendTop = top + rows * row + 18 + kinds.height;
  const caption = `${showBytes(request.lengthBytes)} for ${request.numTokens} tokens, in ${counted(request.merged, "run")} of bytes`;
  return page(width, legendTop + legend.length * 20 + 4, [
    ...(titled
      ? [
          text(EDGE, 28, report.title, 18, { weight: "bold" }),
          text(EDGE, 50, caption, 13, { soft: true }),
        ]
      : []),
    ...sides,
    ...curves,
    ...boxes,
    ...kinds.parts,
    ...legend.map(({ dash, says }, index) => {
      const at = legendTop + index * 20;
      const sample =
        dash === undefined
          ? ""
          : `<path class="soft-line" d="M ${EDGE} ${at - 4} h 28" fill="none" stroke="${LIGHT.soft}" stroke-width="2.5"${dash}/>`;
      return sample + text(EDGE + (dash === undefined ? 0 : 38), at, says, 12, { soft: true });
    }),
  ]);
}

/** Each kind's bar is as long as its share of the request. One kind has no bar. */
function kindsOf(
  { kinds, request }: PlanReport,
  { width }: Shape,
  top: number,
): { readonly parts: readonly string[]; readonly height: number } {
  if (kinds.length < 2) return { parts: [], height: 0 };
  const title = `The KV of ${request.numTokens} tokens on a decode rank:`;
  const most = Math.max(1, ...kinds.map(({ requestBytes }) => requestBytes));
  const parts = kinds.flatMap(({ name, layers, requestBytes }, index) => {
    const y = top + 24 + index * KIND_HEIGHT;
    const length = Math.max(2, ((width - 2 * EDGE) * requestBytes) / most);
    return [
      text(EDGE, y, `${name}: ${showBytes(requestBytes)} in ${counted(layers, "layer")}`, 12),
      `<rect class="kind c${index % COLOURS}" x="${EDGE}" y="${y + 5}" width="${length.toFixed(1)}" height="7" fill="none" stroke="${colourOf(index)}" stroke-width="3"/>`,
    ];
  });
  return {
    parts: [text(EDGE, top, title, 12, { weight: "bold" }), ...parts],
    height: 36 + kinds.length * KIND_HEIGHT,
  };
}

function legendOf(
  report: PlanReport,
  left: readonly string[],
  most: number,
): { dash?: string; says: string }[] {
  const notifies = report.ranks.some(({ notifyOnly }) => notifyOnly.length > 0);
  const entries = [
    { dash: "", says: "a read: these KV bytes go from P to D" },
    ...(notifies
      ? [{ dash: ' stroke-dasharray="5 4"', says: "a notice only: D reads a copy elsewhere" }]
      : []),
    { says: "P: prefill rank. D: decode rank. heads: its KV heads." },
    { says: `frees after N: P keeps the blocks until N notices have come` },
    ...left.map((says) => ({ says })),
  ];
  return entries.flatMap(({ says, ...entry }) =>
    wrapped(says, most).map((line, index) =>
      index === 0 ? { ...entry, says: line } : { says: line },
    ),
  );
}

function leftOut(count: number, side: string): string | undefined {
  return count > MAX_DRAWN
    ? `Not drawn: ${count - MAX_DRAWN} of ${count} ${side} ranks.`
    : undefined;
}

function refused({
  title,
  reason,
  hint,
  wouldWork,
}: Extract<PairReport, { outcome: "refused" }>): string {
  const lines = [
    reason,
    ...(hint === null ? [] : [hint]),
    ...wouldWork.map((change) => `Has a plan: ${change}.`),
  ].flatMap((line) => wrapped(line, 110));
  return page(960, 90 + lines.length * 22, [
    text(EDGE, 30, title, 18, { weight: "bold" }),
    text(EDGE, 56, "Refused", 15, { weight: "bold" }),
    ...lines.map((line, index) => text(EDGE, 82 + index * 22, line, 14)),
  ]);
}

function wrapped(line: string, most: number): string[] {
  const lines: string[] = [];
  for (const word of line.split(/\s+/)) {
    const last = lines.at(-1);
    if (last === undefined || last.length + word.length >= most) lines.push(word);
    else lines[lines.length - 1] = `${last} ${word}`;
  }
  return lines;
}

interface BoxOptions {
  readonly x: number;
  readonly middle: number;
  readonly data: string;
  readonly name: string;
  readonly right: string;
  readonly below: string;
  /** Index among prefill ranks; undefined for a decode rank. */
  readonly colour?: number;
}

function boxOf(
  { box, name: nameSize, what }: Shape,
  { x, middle, data, name, right, below, colour }: BoxOptions,
): string {
  const y = middle - BOX_HEIGHT / 2;
  const stroke = colour === undefined ? LIGHT.soft : colourOf(colour, LIGHT.lightness);
  const kind = colour === undefined ? "soft-line" : `c${colour % COLOURS}`;
  return (
    `<g class="rank" ${data}><rect class="paper ${kind}" x="${x}" y="${y}" width="${box}" height="${BOX_HEIGHT}" rx="6" fill="${LIGHT.paper}" stroke="${stroke}" stroke-width="2"/>` +
    text(x + 10, y + 19, name, nameSize, { weight: "bold" }) +
    text(x + box - 10, y + 19, right, what, { anchor: "end" }) +
    `${text(x + 10, y + 36, below, what, { soft: true })}</g>`
  );
}

function curveOf(
  x: number,
  y: number,
  toX: number,
  toY: number,
  { data, title, colour }: { data: string; title: string; colour: number | undefined },
): string {
  const middle = (x + toX) / 2;
  const stroke = colour === undefined ? LIGHT.soft : colourOf(colour, LIGHT.lightness);
  const dash = colour === undefined ? ' stroke-dasharray="5 4"' : "";
  const kind = colour === undefined ? "soft-line" : `c${colour % COLOURS}`;
  return (
    `<path class="edge ${kind}" ${data} d="M ${x} ${y} C ${middle} ${y}, ${middle} ${toY}, ${toX} ${toY}" fill="none" stroke="${stroke}" stroke-width="2.5"${dash}>` +
    `<title>${escapeXml(title)}</title></path>`
  );
}

interface TextOptions {
  readonly anchor?: string;
  readonly weight?: "bold";
  readonly soft?: boolean;
}

function text(
  x: number,
  y: number,
  content: string,
  size: number,
  { anchor, weight, soft }: TextOptions = {},
): string {
  const placed = anchor === undefined || anchor === "start" ? "" : ` text-anchor="${anchor}"`;
  const heavy = weight === undefined ? "" : ` font-weight="${weight}"`;
  const [kind, fill] = soft === true ? ["soft", LIGHT.soft] : ["ink", LIGHT.ink];
  return `<text class="${kind}" x="${x}" y="${y}" font-family="sans-serif" font-size="${size}"${heavy}${placed} fill="${fill}">${escapeXml(content)}</text>`;
}

/** Neighbours differ. Hexadecimal, the only form that slide programs know. */
function colourOf(index: number, lightness = LIGHT.lightness): string {
  const hue = ((index % COLOURS) * 137.508 + 210) % 360;
  const reach = 0.62 * Math.min(lightness, 1 - lightness);
  const channel = (offset: number) => {
    const k = (offset + hue / 30) % 12;
    const value = lightness - reach * Math.max(-1, Math.min(k - 3, 9 - k, 1));
    return Math.round(value * 255)
      .toString(16)
      .padStart(2, "0");
  };
  return `#${channel(0)}${channel(8)}${channel(4)}`;
}

const darkColours = Array.from(
  { length: COLOURS },
  (_, index) => `.kv-plan .c${index}{stroke:${colourOf(index, DARK.lightness)}}`,
).join("");

const STYLE =
  ".kv-plan.chosen .edge,.kv-plan.chosen .rank{opacity:.25}.kv-plan.chosen .on{opacity:1}.kv-plan .edge.on{stroke-width:4}" +
  `@media (prefers-color-scheme:dark){.kv-plan .ink{fill:${DARK.ink}}.kv-plan .soft{fill:${DARK.soft}}.kv-plan .soft-line{stroke:${DARK.soft}}` +
  `.kv-plan .paper{fill:${DARK.paper}}${darkColours}}`;

function page(width: number, height: number, content: readonly string[]): string {
  return (
    `<svg xmlns="http://www.w3.org/2000/svg" class="kv-plan" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img">\n` +
    `<style>${STYLE}</style>\n<rect class="paper" width="${width}" height="${height}" fill="${LIGHT.paper}"/>\n${content.join("\n")}\n</svg>\n`
  );
}
