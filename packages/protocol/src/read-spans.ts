import { KvError, type SpanAttributes } from "@kv/interface";
import { isMap, MapFields } from "./encoding/map-fields.js";

/** A span of a trace file, as `readSpans` reads it. */
export interface TraceSpan {
  /** 32 hex digits. */
  readonly traceId: string;
  /** 16 hex digits. */
  readonly spanId: string;
  /** 16 hex digits; undefined for the first span of a trace. */
  readonly parentSpanId: string | undefined;
  /** Name of the operation, such as "kv.read". */
  readonly name: string;
  /** `service.name` and `service.instance.id` of the process, such as "kv-demo prefill-0". */
  readonly process: string;
  /** Milliseconds since 1970. */
  readonly startMs: number;
  /** Milliseconds since 1970. */
  readonly endMs: number;
  /** The span's attributes; lists and maps are left out. */
  readonly attributes: SpanAttributes;
  /** What was recorded while the span lasted, in order. */
  readonly events: readonly { readonly name: string; readonly atMs: number }[];
  /** Message of the error that ended the span; undefined after a success. */
  readonly error: string | undefined;
}

const MAX_ITEMS = 100_000;
const MAX_NAME_LENGTH = 256;
const MAX_VALUE_LENGTH = 4096;
const STATUS_ERROR = 2;

/**
 * Reads one line of an OTLP JSON file (`TracesData` or `ExportTraceServiceRequest`), of this
 * project's programs or of an OpenTelemetry Collector's file exporter. Unknown keys are ignored.
 *
 * @throws `KV_WIRE_MALFORMED` naming the field, `KV_WIRE_LIMIT_EXCEEDED`.
 */
export function readSpans(line: string): TraceSpan[] {
  let value: unknown;
  try {
    value = JSON.parse(line);
  } catch (error) {
    throw KvError.from(error, "KV_WIRE_MALFORMED", "the line is no JSON");
  }
  const data = new OtlpFields(value, "OTLP");
  if (data.raw("resourceSpans") === undefined)
    throw data.malformed("resourceSpans", "a list", undefined);
  return data.items("resourceSpans").flatMap((each) => {
    const resource = new OtlpFields(each.raw("resource") ?? {}, "resource");
    const { "service.name": service, "service.instance.id": instance } = resource.attributes();
    const process = [service, instance].filter(Boolean).join(" ") || "unknown";
    const scopes = each.items("scopeSpans");
    return scopes.flatMap((scope) => scope.items("spans").map((span) => readSpan(span, process)));
  });
}

function readSpan(span: OtlpFields, process: string): TraceSpan {
  const startMs = span.time("startTimeUnixNano");
  const endMs = span.time("endTimeUnixNano");
  if (endMs < startMs)
    throw span.malformed("endTimeUnixNano", "a time after the start", span.raw("endTimeUnixNano"));
  const status = span.raw("status");
  const isError = isMap(status) && status["code"] === STATUS_ERROR;
  return {
    traceId: span.id("traceId", 32),
    spanId: span.id("spanId", 16),
    parentSpanId: span.raw("parentSpanId") ? span.id("parentSpanId", 16) : undefined,
    name: span.string("name", { minLength: 1, maxLength: MAX_NAME_LENGTH }),
    process,
    startMs,
    endMs,
    attributes: span.attributes(),
    events: span.items("events").map((event) => ({
      name: event.string("name", { maxLength: MAX_NAME_LENGTH }),
      atMs: event.time("timeUnixNano"),
    })),
    error: isError ? text(status["message"]) || "failed" : undefined,
  };
}

class OtlpFields extends MapFields {
  constructor(value: unknown, what: string) {
    super(value, { what, maxItems: MAX_ITEMS });
  }

  /** None where the field is absent. */
  items(name: string): OtlpFields[] {
    const list = this.raw(name) ?? [];
    if (!Array.isArray(list)) throw this.malformed(name, "a list", list);
    if (list.length <= MAX_ITEMS) return list.map((item) => new OtlpFields(item, `one of ${name}`));
    throw new KvError(
      "KV_WIRE_LIMIT_EXCEEDED",
      `${name} has ${list.length} items, more than ${MAX_ITEMS}`,
    );
  }

  id(name: string, digits: number): string {
    const value = this.raw(name);
    if (typeof value === "string" && value.length === digits && /^[0-9a-f]+$/i.test(value))
      return value.toLowerCase();
    throw this.malformed(name, "an id in hex", value);
  }

  /** Nanoseconds as digits or a number. Milliseconds as a double are exact to a microsecond. */
  time(name: string): number {
    const value = this.raw(name);
    const isDigits = typeof value === "string" && /^\d{1,20}$/.test(value);
    if (isDigits || (typeof value === "number" && value >= 0)) return Number(value) / 1e6;
    throw this.malformed(name, "nanoseconds since 1970", value);
  }

  attributes(): SpanAttributes {
    const attributes: Record<string, string | number | boolean> = {};
    for (const entry of this.items("attributes")) {
      const [key, value] = [entry.raw("key"), entry.raw("value")];
      if (typeof key !== "string" || !isMap(value)) continue;
      const { stringValue, boolValue, intValue, doubleValue } = value;
      const found = stringValue ?? boolValue ?? Number(intValue ?? doubleValue ?? Number.NaN);
      const name = key.slice(0, MAX_NAME_LENGTH);
      if (typeof found === "string") attributes[name] = text(found);
      else if (typeof found === "boolean" || Number.isFinite(found))
        attributes[name] = found as boolean | number;
    }
    return attributes;
  }
}

function text(value: unknown): string {
  return typeof value === "string" ? value.slice(0, MAX_VALUE_LENGTH) : "";
}
