import type { IncomingHttpHeaders } from "node:http";
import { KvError } from "@kv/interface";
import {
  context,
  defaultTextMapGetter,
  defaultTextMapSetter,
  propagation,
  type Span,
  SpanKind,
  SpanStatusCode,
  trace,
} from "@opentelemetry/api";

/** A span of a request or of a leg: its context goes to the legs or to the instance, and it ends once. */
export interface LegSpan {
  /** Trace headers of this span; without a tracer the client's stay as they are. */
  readonly headers: Readonly<Record<string, string>>;
  set(attributes: Readonly<Record<string, string | number>>): void;
  end(error?: unknown): void;
}

export interface Tracing {
  /** The span of a client's request; the legs' spans lie under it when they are given its headers. */
  request(given: IncomingHttpHeaders, attributes: Readonly<Record<string, string>>): LegSpan;
  leg(name: string, given: IncomingHttpHeaders, attributes: Readonly<Record<string, string>>): LegSpan;
}

/** The span of whoever records none. */
export const NO_SPAN: LegSpan = { headers: {}, set() {}, end() {} };

/** Spans through `@opentelemetry/api`: nothing where no SDK is registered. */
export function openTelemetryTracing(): Tracing {
  const tracer = trace.getTracer("@kv/proxy");
  function begin(
    name: string,
    kind: SpanKind,
    given: IncomingHttpHeaders,
    attributes: Readonly<Record<string, string>>,
  ): LegSpan {
    const parent = propagation.extract(context.active(), given, defaultTextMapGetter);
    const span = tracer.startSpan(name, { kind, attributes }, parent);
    if (!span.isRecording()) return NO_SPAN;
    const headers: Record<string, string> = {};
    propagation.inject(trace.setSpan(parent, span), headers, defaultTextMapSetter);
    return { headers, set: (more) => void span.setAttributes(more), end: (error) => end(span, error) };
  }
  return {
    request: (given, attributes) => begin("kv_proxy.request", SpanKind.SERVER, given, attributes),
    leg: (name, given, attributes) => begin(name, SpanKind.CLIENT, given, attributes),
  };
}

function end(span: Span, error: unknown): void {
  if (error !== undefined) {
    const { code, message } = KvError.from(error, "KV_INTERNAL", "the leg failed");
    span.setAttribute("error.type", code);
    span.setStatus({ code: SpanStatusCode.ERROR, message });
  }
  span.end();
}
