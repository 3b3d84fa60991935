import { counted, escapeXml, showBytes } from "../render/format.js";
import type { GroupSize, SizeReport } from "./size-report.js";

const whole = (value: number) => Math.floor(value).toLocaleString("en-US");

/** One screen of text. */
export function renderSize(report: SizeReport): string {
  const { settings, memory, pool, handover } = report;
  const gpus = settings.tpSize * settings.dpSize;
  const tokenBytes = report.groups.reduce((sum, group) => sum + group.tokenBytes, 0);
  const lines = [
    `${report.title} on ${counted(gpus, "GPU")} of ${showBytes(settings.memoryBytes)}`,
    `planned from: ${report.plannedFrom}`,
    "",
    `one GPU: ${bar(report)}`,
    ...partsOf(report).map(
      ({ what, bytes }) => `  ${what.padEnd(44)}${showBytes(bytes).padStart(10)}`,
    ),
    "",
    `a token: ${showBytes(tokenBytes)} on each GPU; a request of ${whole(settings.requestTokens)} tokens:`,
    ...report.groups.map(
      (group) =>
        `  ${`${group.layers} ${group.kind}, blocks of ${whole(group.blockTokens)}`.padEnd(36)}${growth(group).padEnd(28)}${whole(group.requestBlocks).padStart(7)} blocks${showBytes(group.requestBytes).padStart(11)}`,
    ),
    "",
    `fits: ${whole(report.tokens)} tokens in ${whole(pool.blocks)} blocks of ${showBytes(pool.blockBytes)}${settings.dpSize === 1 ? "" : ` on each of ${settings.dpSize} replicas`}`,
    `      ${report.concurrency.toFixed(2)} requests of ${whole(settings.requestTokens)} tokens at once`,
    handover === null
      ? "a hand-over: this model has none"
      : `a hand-over: ${showBytes(handover.lengthBytes)} to each GPU, ${counted(handover.descriptors, "descriptor")} (${whole(handover.merged)} after merging), ${Number(handover.transferMs.toPrecision(3))} ms at ${settings.bandwidthGBps} GB/s`,
    "",
    `assumed: ${settings.utilization} of the memory (--gpu-memory-utilization), batches of ${whole(settings.batchedTokens)} tokens, ${showBytes(memory.otherBytes)} that vLLM measures at start (--other)`,
    ...(memory.isEstimate ? ["estimate: the weights, from the config's sizes (--weights)"] : []),
    ...report.assumed,
  ];
  return `${lines.join("\n")}\n`;
}

function growth({ kind, tokenBytes }: GroupSize): string {
  if (tokenBytes > 0) return `${showBytes(tokenBytes)} a token`;
  return kind === "mamba" ? "a state, whatever the length" : "a window, whatever the length";
}

interface Part {
  readonly what: string;
  readonly bytes: number;
  readonly letter: string;
}

function partsOf({ memory }: SizeReport): readonly Part[] {
  return [
    {
      what: memory.isEstimate ? "weights (estimate)" : "weights",
      bytes: memory.weightsBytes,
      letter: "W",
    },
    { what: "activations and graphs (estimate)", bytes: memory.otherBytes, letter: "a" },
    { what: "KV cache", bytes: memory.cacheBytes, letter: "K" },
    { what: "unused", bytes: memory.unusedBytes, letter: "." },
  ];
}

const BAR_LETTERS = 60;

function bar(report: SizeReport): string {
  const { memoryBytes } = report.settings;
  let [drawn, bytes] = ["", 0];
  for (const part of partsOf(report)) {
    bytes += part.bytes;
    drawn = drawn.padEnd(Math.round((BAR_LETTERS * bytes) / memoryBytes), part.letter);
  }
  return `[${drawn}]`;
}

/** The memory of one GPU as a bar, and the sizes as text, for the page. */
export function sizeHtml(report: SizeReport): string {
  const { memoryBytes } = report.settings;
  const colours = ["#7a6ff0", "#c9a227", "#1f9d6b", "transparent"];
  let left = 0;
  const pieces = partsOf(report).map(({ what, bytes }, index) => {
    const width = (100 * bytes) / memoryBytes;
    const piece = `<span class="piece" style="left:${left}%;width:${width}%;background:${colours[index]}" title="${escapeXml(`${what}: ${showBytes(bytes)}`)}"></span>`;
    left += width;
    return piece;
  });
  return `<div class="bar" role="img" aria-label="memory of one GPU">${pieces.join("")}</div><pre id="size" tabindex="0">${escapeXml(renderSize(report))}</pre>`;
}
