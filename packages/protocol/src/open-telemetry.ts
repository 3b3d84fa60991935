/** `@kv/protocol/open-telemetry`: the only entry that loads `@opentelemetry/api`. */

import { KvError, readTraceparent, type Tracer } from "@kv/interface";
import {
  type Tracer as ApiTracer,
  isSpanContextValid,
  ROOT_CONTEXT,
  SpanKind,
  SpanStatusCode,
  TraceFlags,
  trace,
} from "@opentelemetry/api";

const KINDS = {
  internal: SpanKind.INTERNAL,
  server: SpanKind.SERVER,
  client: SpanKind.CLIENT,
} as const;

/** Exact to a microsecond; OpenTelemetry's own times begin at whole milliseconds. */
const now = () => performance.timeOrigin + performance.now();

/**
 * Returns a tracer on OpenTelemetry's, such as `trace.getTracer("engine")`. Its provider samples
 * spans without a parent, and exports all.
 */
export function openTelemetryTracer(tracer: ApiTracer): Tracer {
  return {
    start(name, { parent, kind = "internal", attributes } = {}) {
      const above = remoteContext(parent);
      if (above !== undefined && (above.traceFlags & TraceFlags.SAMPLED) === 0) return undefined;
      const context =
        above === undefined ? ROOT_CONTEXT : trace.setSpanContext(ROOT_CONTEXT, above);
      const options = { kind: KINDS[kind], attributes: { ...attributes }, startTime: now() };
      const span = tracer.startSpan(name, options, context);
      const own = span.spanContext();
      // The provider records nothing.
      if (!isSpanContextValid(own)) return undefined;

      return {
        traceparent: `00-${own.traceId}-${own.spanId}-0${own.traceFlags & TraceFlags.SAMPLED}`,
        set(more) {
          if (span.isRecording()) span.setAttributes(more);
        },
        event(event, more) {
          if (span.isRecording()) span.addEvent(event, more, now());
        },
        end(error) {
          if (!span.isRecording()) return;
          if (error !== undefined) {
            const { code, message } = KvError.from(error, "KV_INTERNAL", "failed");
            span.setAttribute("error.type", code);
            span.setStatus({ code: SpanStatusCode.ERROR, message });
          }
          span.end(now());
        },
      };
    },
  };
}

function remoteContext(parent: string | undefined) {
  const [, traceId = "", spanId = "", flags = ""] = readTraceparent(parent)?.split("-") ?? [];
  if (traceId === "") return undefined;
  return { traceId, spanId, traceFlags: Number.parseInt(flags, 16), isRemote: true };
}
