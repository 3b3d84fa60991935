import type { Span, Tracer } from "@kv/interface";

/** Where a span goes: a tracer, if there is one, and the `traceparent` of the span's parent. */
export interface SpanPlace {
  /** Undefined: no span is recorded. */
  readonly tracer?: Tracer | undefined;
  /** Undefined begins a new trace. */
  readonly parent: string | undefined;
}

/**
 * The `traceparent` as a member of a step's plain data: none where there is no trace, because plain
 * data has no undefined members.
 */
export function traceMember(traceparent: string | undefined): { readonly traceparent?: string } {
  return traceparent === undefined ? {} : { traceparent };
}

/** Ends the span with the outcome of `work`. Returns `work`. */
export function endWith<T>(span: Span | undefined, work: Promise<T>): Promise<T> {
  if (span !== undefined)
    work.then(
      () => span.end(),
      (error: unknown) => span.end(error),
    );
  return work;
}

/** Runs `work` in a span, which ends with it. */
export function inSpan<T>(span: Span | undefined, work: () => T): T {
  try {
    const result = work();
    span?.end();
    return result;
  } catch (error) {
    span?.end(error);
    throw error;
  }
}
