import { KvError, type SpanAttributes } from "@kv/interface";
import { isMap, MapFields } from "../encoding/map-fields.js";

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
const MAX_EVENTS = 10_000;
const MAX_NAME_LENGTH = 256;
const MAX_VALUE_LENGTH = 4096;
const TRACE_ID = /^[0-9a-f]{32}$/i;
const SPAN_ID = /^[0-9a-f]{16}$/i;
const STATUS_ERROR = 2;

/**
 * Reads one line of an OTLP JSON file (`TracesData` or `ExportTraceServiceRequest`), of this
 * project's programs or of an OpenTelemetry Collector's file exporter. Unknown keys are ignored.
 * Errors: `KV_WIRE_MALFORMED` naming the field, `KV_WIRE_LIMIT_EXCEEDED`.
 */
export function readSpans(line: string): TraceSpan[] {
  let value: unknown;
  try {
    value = JSON.parse(line);
  } catch (error) {
    throw KvError.from(error, "KV_WIRE_MALFORMED", "the line is no JSON");
  }
  return items(value, "OTLP", "resourceSpans", true).flatMap((resource) => {
    const process = processOf(resource);
    return items(resource, "resourceSpans", "scopeSpans").flatMap((scope) =>
      items(scope, "scopeSpans", "spans").map((span) => readSpan(span, process)),
    );
  });
}

function readSpan(value: unknown, process: string): TraceSpan {
  const fields = new MapFields(value, { what: "span", maxItems: MAX_EVENTS });
  const parent = fields.raw("parentSpanId");
  const startMs = time(fields, "startTimeUnixNano");
  const endMs = time(fields, "endTimeUnixNano");
  if (endMs < startMs)
    throw fields.malformed(
      "endTimeUnixNano",
      "a time after the start",
      fields.raw("endTimeUnixNano"),
    );
  const status = fields.raw("status");
  const isError = isMap(status) && status["code"] === STATUS_ERROR;
  return {
    traceId: id(fields, "traceId", TRACE_ID),
    spanId: id(fields, "spanId", SPAN_ID),
    parentSpanId:
      parent === undefined || parent === "" ? undefined : id(fields, "parentSpanId", SPAN_ID),
    name: fields.string("name", { minLength: 1, maxLength: MAX_NAME_LENGTH }),
    process,
    startMs,
    endMs,
    attributes: attributesOf(value),
    events: items(value, "span", "events").map((event) => {
      const read = new MapFields(event, { what: "event of a span", maxItems: MAX_EVENTS });
      return {
        name: read.string("name", { maxLength: MAX_NAME_LENGTH }),
        atMs: time(read, "timeUnixNano"),
      };
    }),
    error: isError ? text(status["message"]) || "failed" : undefined,
  };
}

function processOf(resource: unknown): string {
  const { ["service.name"]: service, ["service.instance.id"]: instance } = attributesOf(
    isMap(resource) ? resource["resource"] : undefined,
  );
  return (
    [service, instance].filter((part) => part !== undefined && part !== "").join(" ") || "unknown"
  );
}

function attributesOf(owner: unknown): SpanAttributes {
  const attributes: Record<string, string | number | boolean> = {};
  if (!isMap(owner)) return attributes;
  for (const entry of items(owner, "span", "attributes")) {
    if (!isMap(entry) || !isMap(entry["value"]) || typeof entry["key"] !== "string") continue;
    const { stringValue, intValue, doubleValue, boolValue } = entry["value"];
    const number = Number(intValue ?? doubleValue);
    const key = entry["key"].slice(0, MAX_NAME_LENGTH);
    if (typeof stringValue === "string") attributes[key] = text(stringValue);
    else if (typeof boolValue === "boolean") attributes[key] = boolValue;
    else if (Number.isFinite(number)) attributes[key] = number;
  }
  return attributes;
}

function items(value: unknown, what: string, name: string, isRequired = false): readonly unknown[] {
  const fields = new MapFields(value, { what, maxItems: MAX_ITEMS });
  const list = fields.raw(name) ?? (isRequired ? undefined : []);
  if (!Array.isArray(list)) throw fields.malformed(name, "a list", list);
  if (list.length <= MAX_ITEMS) return list;
  throw new KvError(
    "KV_WIRE_LIMIT_EXCEEDED",
    `${what}: ${name} has ${list.length} items, more than ${MAX_ITEMS}`,
  );
}

function id(fields: MapFields, name: string, form: RegExp): string {
  const value = fields.raw(name);
  if (typeof value === "string" && form.test(value)) return value.toLowerCase();
  throw fields.malformed(name, "an id in hex", value);
}

/** Nanoseconds as digits or a number. Milliseconds as a double are exact to a microsecond. */
function time(fields: MapFields, name: string): number {
  const value = fields.raw(name);
  const isDigits = typeof value === "string" && /^\d{1,20}$/.test(value);
  if (isDigits || (typeof value === "number" && value >= 0)) return Number(value) / 1e6;
  throw fields.malformed(name, "nanoseconds since 1970", value);
}

function text(value: unknown): string {
  return typeof value === "string" ? value.slice(0, MAX_VALUE_LENGTH) : "";
}
