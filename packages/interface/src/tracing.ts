/**
 * Attributes of a span or an event. An undefined value is left out. The project's own names begin
 * with `kv.`; times end in `_ms`.
 */
export type SpanAttributes = Readonly<Record<string, string | number | boolean | undefined>>;

/** Options of `Tracer.start`. */
export interface SpanOptions {
  /**
   * W3C `traceparent` of the parent, from this process or from another one. Untrusted: a malformed
   * value, like an absent one, begins a new trace.
   */
  readonly parent?: string | undefined;
  /**
   * `server`: answers a request of another process. `client`: waits for another process. @default
   * "internal"
   */
  readonly kind?: "internal" | "server" | "client" | undefined;
  /** Attributes that are known at the start. */
  readonly attributes?: SpanAttributes | undefined;
}

/**
 * A span that has begun. The caller ends it once; other calls after `end` have no effect. No method
 * throws.
 */
export interface Span {
  /** W3C `traceparent` of this span: the parent of its children, in this process and in others. */
  readonly traceparent: string;
  /** Adds attributes. */
  set(attributes: SpanAttributes): void;
  /** Records that something happened now. */
  event(name: string, attributes?: SpanAttributes): void;
  /** Ends the span. With an error its status is an error, and `error.type` is the error's code. */
  end(error?: unknown): void;
}

/**
 * Records spans. A part that gets no tracer records nothing, and pays for one comparison:
 * `tracer?.start(…)`. An implementation must not throw.
 */
export interface Tracer {
  /**
   * Begins a span. Undefined where the parent is not sampled (flag 01 of `traceparent` is 0): pass
   * the parent on unchanged.
   */
  start(name: string, options?: SpanOptions): Span | undefined;
}

const TRACEPARENT = /^(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$/;

/**
 * The value of a `traceparent` header or key (W3C Trace Context, version 00) if it is well formed;
 * undefined for anything else.
 */
export function readTraceparent(value: unknown): string | undefined {
  return typeof value === "string" && TRACEPARENT.test(value) ? value : undefined;
}
