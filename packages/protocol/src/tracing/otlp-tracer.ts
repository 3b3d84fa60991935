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
  }

  start(name: string, { parent, kind = "internal", attributes = {} }: SpanOptions = {}): Span | undefined {
    const context = readTraceparent(parent);
    if (context !== undefined && (Number.parseInt(context.slice(53), 16) & SAMPLED) === 0) return undefined;
    const traceId = context?.slice(3, 35) ?? this.#uuid().replaceAll("-", "");
    const uuid = this.#uuid();
    const spanId = uuid.slice(0, 8) + uuid.slice(9, 13) + uuid.slice(14, 18);
    const parentId = context === undefined ? "" : `,"parentSpanId":"${context.slice(36, 52)}"`;
    const head = `{"traceId":"${traceId}","spanId":"${spanId}"${parentId},"name":${JSON.stringify(name)},"kind":${KINDS[kind]}`;
    return new OtlpSpan(`00-${traceId}-${spanId}-01`, head, attributes, {
      now: () => this.#now(),
      ended: (span) => this.#add(span),
    });
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

  /** Nanoseconds since 1970 as digits, with the clock's microseconds. */
  #now(): string {
    return `${Math.round((this.#epochMs + this.#clock.now()) * 1000)}000`;
  }

  #add(span: string): void {
    if (this.#closed) return;
    this.#ended.push(span);
    if (this.#ended.length >= BATCH_SPANS) this.flush();
    else this.#timer ??= this.#clock.setTimer(() => this.flush(), BATCH_MS);
  }
}

interface SpanSink {
  now(): string;
  ended(span: string): void;
}

class OtlpSpan implements Span {
  readonly traceparent: string;
  readonly #head: string;
  readonly #sink: SpanSink;
  readonly #start: string;
  readonly #events: string[] = [];
  #attributes: SpanAttributes;
  #isEnded = false;

  constructor(traceparent: string, head: string, attributes: SpanAttributes, sink: SpanSink) {
    this.traceparent = traceparent;
    this.#head = head;
    this.#attributes = attributes;
    this.#sink = sink;
    this.#start = sink.now();
  }

  set(attributes: SpanAttributes): void {
    this.#attributes = { ...this.#attributes, ...attributes };
  }

  event(name: string, attributes: SpanAttributes = {}): void {
    const at = `{"timeUnixNano":"${this.#sink.now()}","name":${JSON.stringify(name)}`;
    this.#events.push(`${at},"attributes":${encodeAttributes(attributes)}}`);
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
    const events = this.#events.length === 0 ? "" : `,"events":[${this.#events.join(",")}]`;
    const times = `"startTimeUnixNano":"${this.#start}","endTimeUnixNano":"${this.#sink.now()}"`;
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
