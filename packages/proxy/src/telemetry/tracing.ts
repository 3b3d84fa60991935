import type { IncomingHttpHeaders } from "node:http";
import type { Role } from "@kv/fleet";
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

type Attributes = Readonly<Record<string, string>>;

/** The span of a request or of a leg. */
export interface LegSpan {
  /** Trace headers with this span as parent; empty without a tracer, so that the client's headers pass unchanged. */
  readonly headers: Readonly<Record<string, string>>;
  set(attributes: Readonly<Record<string, string | number>>): void;
  /** Ends the span, with an error or without. */
  end(error?: unknown): void;
}

/** The span where no tracer records. */
export const NO_SPAN: LegSpan = { headers: {}, set() {}, end() {} };

/** Spans through `@opentelemetry/api`. Where no SDK is registered, all spans are `NO_SPAN`. */
export class Tracing {
  readonly #tracer = trace.getTracer("@kv/proxy");

  /** Begins the span of a client's request. A leg's span has it as parent when the leg's headers include the span's. */
  request(headers: IncomingHttpHeaders, attributes: Attributes): LegSpan {
    return this.#begin("kv_proxy.request", SpanKind.SERVER, headers, attributes);
  }

  /** Begins the span of a leg. */
  leg(role: Role, headers: IncomingHttpHeaders, attributes: Attributes): LegSpan {
    return this.#begin(`kv_proxy.${role}`, SpanKind.CLIENT, headers, attributes);
  }

  #begin(name: string, kind: SpanKind, parentHeaders: IncomingHttpHeaders, attributes: Attributes): LegSpan {
    const parent = propagation.extract(context.active(), parentHeaders, defaultTextMapGetter);
    const span = this.#tracer.startSpan(name, { kind, attributes }, parent);
    if (!span.isRecording()) return NO_SPAN;
    const headers: Record<string, string> = {};
    propagation.inject(trace.setSpan(parent, span), headers, defaultTextMapSetter);
    return {
      headers,
      set: (more) => void span.setAttributes(more),
      end: (error) => endSpan(span, error),
    };
  }
}

function endSpan(span: Span, error: unknown): void {
  if (error !== undefined) {
    const { code, message } = KvError.from(error, "KV_INTERNAL", "the leg failed");
    span.setAttribute("error.type", code);
    span.setStatus({ code: SpanStatusCode.ERROR, message });
  }
  span.end();
}
