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
  /** `service.instance.id`, such as "prefill-0"; tells processes of one service apart. */
  readonly instance?: string | undefined;
  /**
   * Gets ended spans as one line of OTLP JSON (`ExportTraceServiceRequest`, OpenTelemetry protocol 1.x), without a line break. Must not throw
   * and must not wait.
   */
  write(line: string): void;
}

/** Spans that are written together. */
const BATCH_SPANS = 256;
/** How long an ended span waits for others. */
const BATCH_MS = 500;
const SAMPLED = 1;
const KINDS = { internal: 1, server: 2, client: 3 } as const;
const STATUS_ERROR = 2;

/**
 * Records spans and hands them over as OTLP JSON. Spans are sampled as their parent is; a span without a parent is sampled. `close` writes the
 * spans that have ended; a span that ends later is dropped.
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
  #ended: string[] = [];
  #timer: Timer | undefined;
  #closed = false;

  constructor(options: OtlpTracerOptions) {
    const { clock, random } = ambient(options);
    this.#clock = clock;
    this.#uuid = () => random.uuid();
    this.#write = options.write;
    this.#epochMs = performance.timeOrigin + performance.now() - clock.now();
    const resource = { "service.name": options.service, "service.instance.id": options.instance };
    this.#resource = `{"attributes":${encodeAttributes(resource)}}`;
    this.#spanPrefix = this.#uuid().slice(0, 8);
    this.#sink = { nowUs: () => this.#nowUs(), ended: (span) => this.#add(span) };
  }

  start(name: string, { parent, kind = "internal", attributes = {} }: SpanOptions = {}): Span | undefined {
    const context = readTraceparent(parent);
    if (context !== undefined && (Number.parseInt(context.slice(53), 16) & SAMPLED) === 0) return undefined;
    const traceId = context?.slice(3, 35) ?? this.#uuid().replaceAll("-", "");
    // Unique in a trace is enough, and half the cost of random ids.
    this.#spans = (this.#spans % 0xffff_ffff) + 1;
    const spanId = this.#spanPrefix + this.#spans.toString(16).padStart(8, "0");
    const parentId = context === undefined ? "" : `,"parentSpanId":"${context.slice(36, 52)}"`;
    const head = `{"traceId":"${traceId}","spanId":"${spanId}"${parentId},"name":${JSON.stringify(name)},"kind":${KINDS[kind]}`;
    return new OtlpSpan(`00-${traceId}-${spanId}-01`, head, attributes, this.#sink);
  }

  /** Writes the spans that have ended. */
  flush(): void {
    this.#timer?.cancel();
    this.#timer = undefined;
    if (this.#ended.length === 0) return;
    const spans = this.#ended.join(",");
    this.#ended = [];
    this.#write(
      `{"resourceSpans":[{"resource":${this.#resource},"scopeSpans":[{"scope":{"name":"@kv"},"spans":[${spans}]}]}]}`,
    );
  }

  /** Writes the spans that have ended, and drops all that end later. */
  close(): void {
    this.flush();
    this.#closed = true;
  }

  #nowUs(): number {
    return Math.round((this.#epochMs + this.#clock.now()) * 1000);
  }

  #add(span: string): void {
    if (this.#closed) return;
    this.#ended.push(span);
    if (this.#ended.length >= BATCH_SPANS) this.flush();
    else this.#timer ??= this.#clock.setTimer(() => this.flush(), BATCH_MS);
  }
}

interface SpanSink {
  /** Microseconds since 1970. */
  nowUs(): number;
  ended(span: string): void;
}

class OtlpSpan implements Span {
  readonly traceparent: string;
  readonly #head: string;
  readonly #sink: SpanSink;
  readonly #startUs: number;
  readonly #attributes: Record<string, SpanAttributes[string]>;
  #events = "";
  #isEnded = false;

  constructor(traceparent: string, head: string, attributes: SpanAttributes, sink: SpanSink) {
    this.traceparent = traceparent;
    this.#head = head;
    this.#attributes = { ...attributes };
    this.#sink = sink;
    this.#startUs = sink.nowUs();
  }

  set(attributes: SpanAttributes): void {
    Object.assign(this.#attributes, attributes);
  }

  event(name: string, attributes: SpanAttributes = {}): void {
    const at = `{"timeUnixNano":"${this.#sink.nowUs()}000","name":${JSON.stringify(name)}`;
    this.#events += `${this.#events === "" ? "" : ","}${at},"attributes":${encodeAttributes(attributes)}}`;
  }

  end(error?: unknown): void {
    if (this.#isEnded) return;
    this.#isEnded = true;
    let status = "";
    if (error !== undefined) {
      const { code, message } = KvError.from(error, "KV_INTERNAL", "failed");
      this.set({ "error.type": code });
      status = `,"status":${JSON.stringify({ code: STATUS_ERROR, message })}`;
    }
    const events = this.#events === "" ? "" : `,"events":[${this.#events}]`;
    const times = `"startTimeUnixNano":"${this.#startUs}000","endTimeUnixNano":"${this.#sink.nowUs()}000"`;
    this.#sink.ended(
      `${this.#head},${times},"attributes":${encodeAttributes(this.#attributes)}${events}${status}}`,
    );
  }
}

function encodeAttributes(attributes: SpanAttributes): string {
  let text = "";
  for (const key in attributes) {
    const value = attributes[key];
    if (value === undefined) continue;
    text += `${text === "" ? "" : ","}{"key":${JSON.stringify(key)},"value":${encodeValue(value)}}`;
  }
  return `[${text}]`;
}

/** OTLP JSON has 64-bit integers as strings. JSON has no NaN and no Infinity, which become text. */
function encodeValue(value: string | number | boolean): string {
  if (typeof value === "string") return `{"stringValue":${JSON.stringify(value)}}`;
  if (typeof value === "boolean") return `{"boolValue":${value}}`;
  if (Number.isSafeInteger(value)) return `{"intValue":"${value}"}`;
  return Number.isFinite(value) ? `{"doubleValue":${value}}` : `{"stringValue":"${value}"}`;
}
