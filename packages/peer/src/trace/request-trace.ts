import { createReadStream } from "node:fs";
import { createInterface } from "node:readline";
import { KvError } from "@kv/interface";
import { readSpans, type TraceSpan } from "@kv/protocol";

/** A span in its place among the spans of a request. */
export interface PlacedSpan extends TraceSpan {
  /** 0 for the request's first span; one more than the parent's. */
  readonly depth: number;
  /** It ends after its parent, as a lease does: the request does not wait for it. */
  readonly isBackground: boolean;
}

export interface RequestTrace {
  readonly traceId: string;
  /** `kv.request_id` of the first span that has one. */
  readonly requestId: string | undefined;
  /** Milliseconds since 1970. */
  readonly startMs: number;
  /** End of the first span: from then on the client has its answer. */
  readonly endMs: number;
  /** Parents before their children, siblings by their start. */
  readonly spans: readonly PlacedSpan[];
}

/** Most bytes of a trace file. A longer one is cut into parts by time with other tools. */
const MAX_FILE_BYTES = 512 * 2 ** 20;
const OWN_SPAN = /^kv[._]/;

/**
 * Reads the spans of a file in OTLP JSON lines. A last line that breaks off, as that of a process
 * that was killed, is passed to `warn` and left out.
 *
 * @throws `KV_CONFIG_INVALID` for a file that cannot be read and for one without spans of this
 * project; `KV_WIRE_MALFORMED` naming the line; `KV_WIRE_LIMIT_EXCEEDED`.
 */
export async function readTraceFile(
  file: string,
  warn: (message: string) => void,
): Promise<TraceSpan[]> {
  const spans: TraceSpan[] = [];
  let number = 0;
  let bytes = 0;
  let broken: KvError | undefined;
  try {
    const input = createReadStream(file, "utf8");
    for await (const line of createInterface({ input })) {
      if (broken !== undefined) throw broken;
      number += 1;
      bytes += line.length;
      if (bytes > MAX_FILE_BYTES)
        throw new KvError(
          "KV_WIRE_LIMIT_EXCEEDED",
          `${file} has more than ${MAX_FILE_BYTES} bytes`,
        );
      if (line.trim() === "") continue;
      try {
        for (const span of readSpans(line)) spans.push(span);
      } catch (error) {
        const { code, message } = KvError.from(error, "KV_WIRE_MALFORMED", "");
        broken = new KvError(code, `${file}, line ${number}: ${message}`, { hint: FILE_HINT });
        if (number === 1) throw broken;
      }
    }
  } catch (error) {
    if (KvError.is(error)) throw error;
    throw new KvError("KV_CONFIG_INVALID", `${file} cannot be read: ${String(error)}`, {
      hint: FILE_HINT,
    });
  }
  if (broken !== undefined) warn(`${broken.message}; the line is left out`);
  if (spans.some(({ name }) => OWN_SPAN.test(name))) return spans;
  throw new KvError(
    "KV_CONFIG_INVALID",
    `${file} has ${spans.length} spans, none of them of kv-proxy, an engine or a connector of this project`,
    { hint: FILE_HINT },
  );
}

const FILE_HINT =
  "give a file that npm run demo -- --trace FILE, kv-proxy --trace FILE or a collector's file exporter wrote";

/**
 * The requests of a file, the slowest first. A trace with several first spans (as one client's
 * trace of many requests has) gives one request for each.
 */
export function requestTraces(spans: readonly TraceSpan[]): RequestTrace[] {
  const byId = new Map(spans.map((span) => [`${span.traceId} ${span.spanId}`, span]));
  const above = ({ traceId, parentSpanId }: TraceSpan) => byId.get(`${traceId} ${parentSpanId}`);
  /** The nearest span above that is one of ours: a gateway may have its own in between. */
  const parentOf = (span: TraceSpan) => {
    let parent = above(span);
    for (
      let steps = 0;
      parent !== undefined && !OWN_SPAN.test(parent.name) && steps < MAX_DEPTH;
      steps += 1
    )
      parent = above(parent);
    return parent !== undefined && OWN_SPAN.test(parent.name) ? parent : undefined;
  };
  const children = new Map<TraceSpan, TraceSpan[]>();
  for (const span of spans) {
    const parent = parentOf(span);
    if (parent !== undefined) children.set(parent, [...(children.get(parent) ?? []), span]);
  }
  const traces = spans
    .filter((span) => parentOf(span) === undefined && OWN_SPAN.test(span.name))
    .map((first): RequestTrace => {
      const placed: PlacedSpan[] = [];
      const seen = new Set<TraceSpan>();
      const place = (span: TraceSpan, depth: number, parent: TraceSpan | undefined) => {
        if (seen.has(span) || depth > MAX_DEPTH) return;
        seen.add(span);
        const isBackground = parent !== undefined && span.endMs > parent.endMs + CLOCK_SLACK_MS;
        placed.push({ ...span, depth, isBackground });
        const below = (children.get(span) ?? []).toSorted((a, b) => a.startMs - b.startMs);
        for (const child of below) place(child, depth + 1, span);
      };
      place(first, 0, undefined);
      const { traceId, startMs, endMs } = first;
      const requestId = placed.map(({ attributes }) => attributes["kv.request_id"]).find(Boolean);
      return {
        traceId,
        requestId: requestId === undefined ? undefined : String(requestId),
        startMs,
        endMs,
        spans: placed,
      };
    });
  return traces.toSorted((a, b) => b.endMs - b.startMs - (a.endMs - a.startMs));
}

const MAX_DEPTH = 64;
/**
 * Clocks of two processes differ, and a parent in another process may end a moment before its
 * child.
 */
const CLOCK_SLACK_MS = 2;

/**
 * The request whose id, or whose trace's id, is `wanted` or begins with it; the slowest one when
 * `wanted` is undefined.
 *
 * @throws `KV_CONFIG_INVALID` when there is none, naming some that there are.
 */
export function chooseRequest(
  traces: readonly RequestTrace[],
  wanted: string | undefined,
): RequestTrace {
  const found = traces.find(
    ({ traceId, spans }) =>
      wanted === undefined ||
      traceId.startsWith(wanted) ||
      spans.some(({ attributes }) => String(attributes["kv.request_id"] ?? "").startsWith(wanted)),
  );
  if (found !== undefined) return found;
  const some = traces.slice(0, 5).map(({ requestId, traceId }) => requestId ?? traceId);
  throw new KvError("KV_CONFIG_INVALID", `no request of the file is ${wanted}`, {
    hint: `the file has ${traces.length}, such as ${some.join(", ")}`,
  });
}

export interface TimeShare {
  readonly process: string;
  readonly name: string;
  readonly ms: number;
}

/**
 * Divides the request's time, from its first byte to its last: each moment belongs to the deepest
 * span that lasts then, and among equals to the one that began last. Background spans get no time.
 * The longest shares come first.
 */
export function timeShares({ spans, startMs, endMs }: RequestTrace): TimeShare[] {
  const counted = spans.filter(({ isBackground }) => !isBackground);
  const times = new Set([startMs, endMs, ...counted.flatMap((span) => [span.startMs, span.endMs])]);
  const cuts = [...times].filter((at) => at >= startMs && at <= endMs).toSorted((a, b) => a - b);
  const shares = new Map<string, TimeShare>();
  for (const [index, from] of cuts.slice(0, -1).entries()) {
    const to = cuts[index + 1] ?? from;
    const lasting = counted.filter((span) => span.startMs <= from && span.endMs >= to);
    const owner = lasting.reduce<PlacedSpan | undefined>(
      (best, span) =>
        best === undefined ||
        span.depth > best.depth ||
        (span.depth === best.depth && span.startMs > best.startMs)
          ? span
          : best,
      undefined,
    );
    if (owner === undefined) continue;
    const { process, name } = owner;
    const key = `${process} ${name}`;
    shares.set(key, { process, name, ms: (shares.get(key)?.ms ?? 0) + to - from });
  }
  return [...shares.values()].toSorted((a, b) => b.ms - a.ms);
}
