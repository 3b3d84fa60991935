/**
 * Attributes of a span or event, without undefined ones. The project's names begin with `kv.`;
 * times end in `_ms`.
 */
export type SpanAttributes = Readonly<Record<string, string | number | boolean | undefined>>;

/** Options of `Tracer.start`. */
export interface SpanOptions {
  /** W3C `traceparent` of the parent. Untrusted: without a well-formed value a new trace begins. */
  readonly parent?: string | undefined;
  /** `server` answers another process; `client` waits for one. @default "internal" */
  readonly kind?: "internal" | "server" | "client" | undefined;
  readonly attributes?: SpanAttributes | undefined;
}

/** A span that has begun. The caller ends it once; later calls have no effect. No method throws. */
export interface Span {
  /** W3C `traceparent` for children in any process. */
  readonly traceparent: string;
  set(attributes: SpanAttributes): void;
  /** Records that something happened now. */
  event(name: string, attributes?: SpanAttributes): void;
  /** Ends the span. An error sets its status, and `error.type` to the error's code. */
  end(error?: unknown): void;
}

/** Records spans. An implementation must not throw. */
export interface Tracer {
  /**
   * Undefined where the parent is not sampled (flag 01 of `traceparent` is 0): pass it on
   * unchanged.
   */
  start(name: string, options?: SpanOptions): Span | undefined;
}

const TRACEPARENT = /^(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$/;

/**
 * Returns a well-formed `traceparent` (W3C Trace Context, version 00), undefined for anything else.
 */
export function readTraceparent(value: unknown): string | undefined {
  return typeof value === "string" && TRACEPARENT.test(value) ? value : undefined;
}
