import type { Tracer } from "@kv/interface";
import { readSpans, type TraceSpan } from "@kv/protocol";
import { openTelemetryTracer } from "@kv/protocol/open-telemetry";
import { JsonTraceSerializer } from "@opentelemetry/otlp-transformer";
import {
  InMemorySpanExporter,
  SimpleSpanProcessor,
  TracerProvider,
} from "@opentelemetry/sdk-trace";

/** A tracer whose spans stay in memory. */
export interface RecordedSpans {
  readonly tracer: Tracer;
  /** The spans that have ended, as a line of a trace file. */
  line(): string;
  /** The spans that have ended. */
  spans(): TraceSpan[];
}

export function recordedSpans(): RecordedSpans {
  const exporter = new InMemorySpanExporter();
  const provider = new TracerProvider({ spanProcessors: [new SimpleSpanProcessor({ exporter })] });
  const line = () =>
    Buffer.from(JsonTraceSerializer.serializeRequest(exporter.getFinishedSpans()) ?? "").toString();
  return {
    tracer: openTelemetryTracer(provider.getTracer("@kv")),
    line,
    spans: () => readSpans(line()),
  };
}
