import { openTelemetryTracer } from "@kv/protocol/open-telemetry";
import { JsonTraceSerializer } from "@opentelemetry/otlp-transformer";
import {
  InMemorySpanExporter,
  SimpleSpanProcessor,
  TracerProvider,
} from "@opentelemetry/sdk-trace";

export function recordedSpans() {
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

interface Attribute {
  readonly key: string;
  readonly value: Readonly<Record<string, unknown>>;
}

interface OtlpSpan {
  readonly traceId: string;
  readonly spanId: string;
  readonly parentSpanId?: string;
  readonly name: string;
  readonly startTimeUnixNano: string;
  readonly endTimeUnixNano: string;
  readonly attributes?: readonly Attribute[];
  readonly events?: readonly { readonly name: string; readonly timeUnixNano: string }[];
  readonly status?: { readonly code?: number; readonly message?: string };
}

interface TracesData {
  readonly resourceSpans: readonly {
    readonly resource: { readonly attributes: readonly Attribute[] };
    readonly scopeSpans: readonly { readonly spans: readonly OtlpSpan[] }[];
  }[];
}

const STATUS_ERROR = 2;
const valuesOf = (attributes: readonly Attribute[] = []) =>
  Object.fromEntries(attributes.map(({ key, value }) => [key, Object.values(value)[0]]));
const milliseconds = (nanoseconds: string) => Number(nanoseconds) / 1e6;

/** A span of a trace file. */
export type TraceSpan = ReturnType<typeof readSpans>[number];

/** The spans of one line of an OTLP JSON file. */
export function readSpans(line: string) {
  const { resourceSpans } = JSON.parse(line) as TracesData;
  return resourceSpans.flatMap(({ resource, scopeSpans }) => {
    const of = valuesOf(resource.attributes);
    // Such as "kv-demo prefill-0".
    const process = [of["service.name"], of["service.instance.id"]].filter(Boolean).join(" ");
    return scopeSpans.flatMap(({ spans }) =>
      spans.map((span) => ({
        traceId: span.traceId,
        spanId: span.spanId,
        parentSpanId: span.parentSpanId,
        name: span.name,
        process,
        // Since 1970.
        startMs: milliseconds(span.startTimeUnixNano),
        endMs: milliseconds(span.endTimeUnixNano),
        attributes: valuesOf(span.attributes),
        events: (span.events ?? []).map(({ name, timeUnixNano }) => ({
          name,
          atMs: milliseconds(timeUnixNano),
        })),
        // Undefined after a success.
        error: span.status?.code === STATUS_ERROR ? span.status.message : undefined,
      })),
    );
  });
}
