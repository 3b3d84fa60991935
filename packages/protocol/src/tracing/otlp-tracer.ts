import {
  type AmbientOptions,
  ambient,
  type Clock,
  KvError,
  readTraceparent,
  type Span,
  type SpanAttributes,
  type SpanOptions,
  type Timer,
  type Tracer,
} from "@kv/interface";

/** Options of `OtlpTracer`. */
export interface OtlpTracerOptions extends Pick<AmbientOptions, "clock" | "random"> {
  /** `service.name` of the resource, such as "kv-proxy". */
  readonly service: string;
  /**
   * `service.instance.id`, such as "prefill-0"; tells processes of one service apart. @default
   * undefined
   */
  readonly instance?: string | undefined;
  /**
   * Gets ended spans as one line of OTLP JSON (`ExportTraceServiceRequest`, OpenTelemetry protocol
   * 1.x), without a line break. Must not throw and must not wait.
   */
  write(line: string): void;
}

/** Spans that are written together. */
const BATCH_SPANS = 256;
/** How long an ended span waits for others. */
const BATCH_MS = 500;
const SAMPLED = 1;
const KINDS = { internal: 1, server: 2, client: 3 } as const;
const KIND_TEXTS = [0, 1, 2, 3].map((kind) => `,"kind":${kind},"startTimeUnixNano":"`);
/** Keys of attributes that are remembered. */
const MAX_KEYS = 1000;
const STATUS_ERROR = 2;

/**
 * Records spans and hands them over as OTLP JSON. Spans are sampled as their parent is; a span
 * without a parent is sampled. `close` writes the spans that have ended; a span that ends later is
 * dropped.
 */
export class OtlpTracer implements Tracer {
  readonly #clock: Clock;
  readonly #uuid: () => string;
  readonly #write: (line: string) => void;
  readonly #resource: string;
  /** What added to the clock's time gives milliseconds since 1970. */
  readonly #epochMs: number;
  readonly #sink: SpanSink;
  /** The first half of each span id. */
  readonly #spanPrefix: string;
  #spans = 0;
  /**
   * The text of the spans that have ended, in pieces: one join of all costs less than a
   * concatenation for each span.
   */
  #pieces: string[] = [];
  #ended = 0;
  #timer: Timer | undefined;
  #closed = false;

  constructor(options: OtlpTracerOptions) {
    const { clock, random } = ambient(options);
    this.#clock = clock;
    this.#uuid = () => random.uuid();
    this.#write = options.write;
    this.#epochMs = performance.timeOrigin + performance.now() - clock.now();
    const resource = { "service.name": options.service, "service.instance.id": options.instance };
    this.#resource = `{"attributes":${attributesText([resource])}}`;
    this.#spanPrefix = this.#uuid().slice(0, 8);
    this.#sink = {
      nowUs: () => Math.round((this.#epochMs + this.#clock.now()) * 1000),
      ended: (span) => this.#add(span),
    };
  }

  start(
    name: string,
    { parent, kind = "internal", attributes = {} }: SpanOptions = {},
  ): Span | undefined {
    const context = readTraceparent(parent);
    if (context !== undefined && (Number.parseInt(context.slice(53), 16) & SAMPLED) === 0)
      return undefined;
    const traceId = context?.slice(3, 35) ?? this.#uuid().replaceAll("-", "");
    // Unique in a trace is enough, and half the cost of random ids.
    this.#spans = (this.#spans % 0xffff_ffff) + 1;
    const spanId = this.#spanPrefix + this.#spans.toString(16).padStart(8, "0");
    const parentId = context === undefined ? "" : context.slice(36, 52);
    return new OtlpSpan(
      { traceId, spanId, parentId, name, kind: KINDS[kind] },
      attributes,
      this.#sink,
    );
  }

  /** Writes the spans that have ended. */
  flush(): void {
    this.#timer?.cancel();
    this.#timer = undefined;
    if (this.#ended === 0) return;
    const pieces = this.#pieces;
    pieces.push("]}]}]}");
    this.#pieces = [];
    this.#ended = 0;
    this.#write(pieces.join(""));
  }

  /** Writes the spans that have ended, and drops all that end later. */
  close(): void {
    this.flush();
    this.#closed = true;
  }

  #add(span: OtlpSpan): void {
    if (this.#closed) return;
    const pieces = this.#pieces;
    if (this.#ended === 0)
      pieces.push(
        `{"resourceSpans":[{"resource":${this.#resource},"scopeSpans":[{"scope":{"name":"@kv"},"spans":[`,
      );
    else pieces.push(",");
    span.writeTo(pieces);
    this.#ended += 1;
    if (this.#ended >= BATCH_SPANS) this.flush();
    else this.#timer ??= this.#clock.setTimer(() => this.flush(), BATCH_MS);
  }
}

interface SpanSink {
  /** Microseconds since 1970. */
  nowUs(): number;
  ended(span: OtlpSpan): void;
}

interface SpanHead {
  readonly traceId: string;
  readonly spanId: string;
  /** Empty for a span without a parent. */
  readonly parentId: string;
  readonly name: string;
  readonly kind: number;
}

class OtlpSpan implements Span {
  readonly traceparent: string;
  readonly #head: SpanHead;
  readonly #sink: SpanSink;
  readonly #startUs: number;
  #endUs = 0;
  /** Of the start and of each `set`. The last value of a key counts. */
  readonly #attributes: SpanAttributes[];
  #events = "";
  #status = "";
  #isEnded = false;

  constructor(head: SpanHead, attributes: SpanAttributes, sink: SpanSink) {
    this.traceparent = `00-${head.traceId}-${head.spanId}-01`;
    this.#head = head;
    this.#attributes = [attributes];
    this.#sink = sink;
    this.#startUs = sink.nowUs();
  }

  set(attributes: SpanAttributes): void {
    if (!this.#isEnded) this.#attributes.push(attributes);
  }

  event(name: string, attributes: SpanAttributes = {}): void {
    const at = `{"timeUnixNano":"${nanosText(this.#sink.nowUs())}","name":${JSON.stringify(name)}`;
    this.#events += `${this.#events === "" ? "" : ","}${at},"attributes":${attributesText([attributes])}}`;
  }

  end(error?: unknown): void {
    if (this.#isEnded) return;
    if (error !== undefined) {
      const { code, message } = KvError.from(error, "KV_INTERNAL", "failed");
      this.set({ "error.type": code });
      this.#status = `,"status":${JSON.stringify({ code: STATUS_ERROR, message })}`;
    }
    this.#isEnded = true;
    this.#endUs = this.#sink.nowUs();
    this.#sink.ended(this);
  }

  /** Adds the JSON text of the span, which has ended. */
  writeTo(pieces: string[]): void {
    const { traceId, spanId, parentId, name, kind } = this.#head;
    pieces.push('{"traceId":"', traceId, '","spanId":"', spanId);
    if (parentId !== "") pieces.push('","parentSpanId":"', parentId);
    pieces.push('","name":', jsonText(name), KIND_TEXTS[kind] ?? "");
    pieces.push(
      nanosText(this.#startUs),
      '","endTimeUnixNano":"',
      nanosText(this.#endUs),
      '","attributes":[',
    );
    writeAttributes(this.#attributes, pieces);
    pieces.push("]");
    if (this.#events !== "") pieces.push(',"events":[', this.#events, "]");
    if (this.#status !== "") pieces.push(this.#status);
    pieces.push("}");
  }
}

function attributesText(sets: readonly SpanAttributes[]): string {
  const pieces: string[] = [];
  writeAttributes(sets, pieces);
  return `[${pieces.join("")}]`;
}

function writeAttributes(sets: readonly SpanAttributes[], pieces: string[]): void {
  let separator = "";
  for (let at = 0; at < sets.length; at += 1) {
    const attributes = sets[at] ?? {};
    for (const key in attributes) {
      const value = attributes[key];
      if (value === undefined || isSetAgain(sets, at + 1, key)) continue;
      pieces.push(separator, attributeBegin(key));
      writeValue(value, pieces);
      separator = ",";
    }
  }
}

function isSetAgain(sets: readonly SpanAttributes[], from: number, key: string): boolean {
  for (let at = from; at < sets.length; at += 1)
    if (Object.hasOwn(sets[at] ?? {}, key)) return true;
  return false;
}

/** OTLP JSON has 64-bit integers as strings. JSON has no NaN and no Infinity, which become text. */
function writeValue(value: string | number | boolean, pieces: string[]): void {
  if (typeof value === "string") pieces.push('{"stringValue":', jsonText(value), "}}");
  else if (typeof value === "boolean")
    pieces.push(value ? '{"boolValue":true}}' : '{"boolValue":false}}');
  else if (Number.isSafeInteger(value)) pieces.push('{"intValue":"', String(value), '"}}');
  else if (Number.isFinite(value)) pieces.push('{"doubleValue":', String(value), "}}");
  else pieces.push('{"stringValue":"', String(value), '"}}');
}

const PLAIN = /^[ !#-[\]-~]*$/;

function jsonText(text: string): string {
  return PLAIN.test(text) ? `"${text}"` : JSON.stringify(text);
}

/** What an attribute begins with, by its key. Keys are written in the code, so they are few. */
const begins = new Map<string, string>();

function attributeBegin(key: string): string {
  let begin = begins.get(key);
  if (begin === undefined) {
    begin = `{"key":${JSON.stringify(key)},"value":`;
    if (begins.size < MAX_KEYS) begins.set(key, begin);
  }
  return begin;
}

let lastSecond = 0;
let lastSecondText = "";

/** Microseconds as nanoseconds. Mostly, the second is that of the last call. */
function nanosText(us: number): string {
  const second = Math.floor(us / 1_000_000);
  if (second !== lastSecond) {
    lastSecond = second;
    lastSecondText = String(second);
  }
  return `${lastSecondText}${String(us - second * 1_000_000).padStart(6, "0")}000`;
}
