import { type PlacedSpan, type RequestTrace, timeShares } from "./request-trace.js";

const BAR_WIDTH = 36;

/** A request as text: its spans with bars, then where its time went, by process. */
export function traceText(trace: RequestTrace): string {
  const { spans, startMs, endMs } = trace;
  const lastMs = Math.max(...spans.map((span) => span.endMs));
  const shownMs = shownEndMs(trace) - startMs;
  const nameWidth = Math.max(...spans.map(({ name, depth }) => 2 * depth + name.length));
  const processWidth = Math.max(...spans.map(({ process }) => process.length));
  const rows = spans.map((span) =>
    [
      span.process.padEnd(processWidth),
      `${"  ".repeat(span.depth)}${span.name}`.padEnd(nameWidth),
      bar(span, startMs, shownMs),
      milliseconds(span.startMs - startMs).padStart(10),
      milliseconds(span.endMs - span.startMs).padStart(10),
      detailOf(span),
    ]
      .join("  ")
      .trimEnd(),
  );
  const processes = new Set(spans.map(({ process }) => process));
  const header = [
    "process".padEnd(processWidth),
    "span".padEnd(nameWidth),
    " ".repeat(BAR_WIDTH),
    "begins".padStart(10),
    "lasts".padStart(10),
  ].join("  ");
  const after =
    lastMs > endMs ? `; the last span ends after ${milliseconds(lastMs - startMs)}` : "";
  return [
    `request ${trace.requestId ?? "unknown"}, trace ${trace.traceId}`,
    `${milliseconds(endMs - startMs)}, ${spans.length} spans of ${processes.size} processes${after}`,
    "",
    header,
    ...rows,
    "",
    ...shareLines(trace),
    "",
  ].join("\n");
}

/**
 * The end of what is drawn: a lease may last much longer than its request, and would leave the rest
 * too small to see.
 */
export function shownEndMs({ spans, startMs, endMs }: RequestTrace): number {
  const lastMs = Math.max(...spans.map((span) => span.endMs));
  return Math.min(lastMs, startMs + 1.5 * (endMs - startMs)) || startMs + 1;
}

/** What a span moved or named, such as "64 KiB, 4 descriptors, UCX". */
export function detailOf({ attributes, events, error }: PlacedSpan): string {
  const {
    ["kv.bytes"]: bytes,
    ["kv.descriptors"]: descriptors,
    ["kv.backend"]: backend,
  } = attributes;
  const extended = events.filter(({ name }) => name === "extended").length;
  return [
    bytes === undefined ? "" : size(Number(bytes)),
    descriptors === undefined ? "" : `${descriptors} descriptors`,
    backend === undefined ? "" : String(backend),
    attributes["kv.prompt_tokens"] === undefined
      ? ""
      : `${attributes["kv.prompt_tokens"]} prompt tokens`,
    attributes["kv.output_tokens"] === undefined
      ? ""
      : `${attributes["kv.output_tokens"]} output tokens`,
    extended === 0 ? "" : `extended ${extended} times`,
    error === undefined ? "" : `failed: ${error}`,
  ]
    .filter((part) => part !== "")
    .join(", ");
}

/** Milliseconds with three digits at least, such as "0.12 ms" and "41.3 ms". */
export function milliseconds(ms: number): string {
  return `${ms.toFixed(Math.abs(ms) < 10 ? 2 : Math.abs(ms) < 1000 ? 1 : 0)} ms`;
}

function size(bytes: number): string {
  if (bytes < 1024) return `${bytes} B`;
  return bytes < 2 ** 20
    ? `${(bytes / 1024).toFixed(1)} KiB`
    : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
}

function bar(span: PlacedSpan, startMs: number, shownMs: number): string {
  const column = (ms: number) =>
    Math.max(0, Math.min(BAR_WIDTH, Math.round(((ms - startMs) / shownMs) * BAR_WIDTH)));
  const from = Math.min(column(span.startMs), BAR_WIDTH - 1);
  const to = Math.max(from + 1, column(span.endMs));
  const mark = span.error !== undefined ? "x" : span.isBackground ? "-" : "=";
  return `${" ".repeat(from)}${mark.repeat(to - from)}`.padEnd(BAR_WIDTH);
}

function shareLines(trace: RequestTrace): string[] {
  const shares = timeShares(trace);
  const totalMs = trace.endMs - trace.startMs;
  const percent = (ms: number) => `${((100 * ms) / (totalMs || 1)).toFixed(1)} %`.padStart(7);
  const byProcess = [...new Set(shares.map(({ process }) => process))]
    .map((process) => {
      const own = shares.filter((share) => share.process === process);
      return { process, own, ms: own.reduce((sum, { ms }) => sum + ms, 0) };
    })
    .toSorted((a, b) => b.ms - a.ms);
  return [
    "where the time went; each moment counts for the deepest span that lasts, and background spans (-) do not count",
    ...byProcess.flatMap(({ process, own, ms }) => [
      `${milliseconds(ms).padStart(10)} ${percent(ms)}  ${process}`,
      ...own.map(
        (share) => `${milliseconds(share.ms).padStart(10)} ${percent(share.ms)}    ${share.name}`,
      ),
    ]),
  ];
}
