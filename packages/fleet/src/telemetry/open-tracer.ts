import { createWriteStream, openSync } from "node:fs";
import type { Log, Tracer } from "@kv/interface";
import type { SpanExporter } from "@opentelemetry/sdk-trace";
import { invalidConfig } from "../settings/invalid-config.js";

/** The result of `openTracer`. */
export interface OpenedTracer {
  readonly tracer: Tracer | undefined;
  /** Resolves when all ended spans were written or dropped. */
  close(): Promise<void>;
}

/** For a slow file or collector. Later spans are dropped. */
const MAX_WAITING_SPANS = 16_384;
const BATCH_MS = 500;

/**
 * Opens outputs for spans: `file`, to which it appends OTLP JSON lines, and the collector of
 * `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, or of `OTEL_EXPORTER_OTLP_ENDPOINT` with `/v1/traces` (OTLP
 * over HTTP in JSON, headers of `OTEL_EXPORTER_OTLP_HEADERS`). Spans that cannot be written are
 * dropped and logged.
 *
 * @throws `KV_CONFIG_INVALID` for a file that cannot be opened, an endpoint that is no URL, and a
 * protocol other than http/json.
 */
export async function openTracer(
  file: string | undefined,
  { service, instance, log }: { service: string; instance: string; log: Log },
): Promise<OpenedTracer> {
  const collector = collectorUrl(process.env);
  if (file === undefined && collector === undefined) return { tracer: undefined, async close() {} };

  const [{ diag, DiagLogLevel }, { openTelemetryTracer }, sdk, resources, otlp] = await Promise.all(
    [
      import("@opentelemetry/api"),
      import("@kv/protocol/open-telemetry"),
      import("@opentelemetry/sdk-trace"),
      import("@opentelemetry/resources"),
      import("@opentelemetry/exporter-trace-otlp-http"),
    ],
  );
  const warn = (message: string) => log.warn("open-telemetry", { message });
  diag.setLogger(
    { error: warn, warn, info: warn, debug: warn, verbose: warn },
    { logLevel: DiagLogLevel.WARN, suppressOverrideMessage: true },
  );
  const exporters = [
    ...(file === undefined ? [] : [reporting(await fileExporter(file), file, log)]),
    ...(collector === undefined
      ? []
      : [reporting(new otlp.OTLPTraceExporter(), collector.origin, log)]),
  ];
  const provider = new sdk.TracerProvider({
    resource: resources.resourceFromAttributes({
      "service.name": service,
      "service.instance.id": instance,
    }),
    spanProcessors: exporters.map(
      (exporter) =>
        new sdk.BatchSpanProcessor({
          exporter,
          maxQueueSize: MAX_WAITING_SPANS,
          scheduledDelayMillis: BATCH_MS,
        }),
    ),
  });
  return {
    tracer: openTelemetryTracer(provider.getTracer("@kv")),
    close: () => provider.shutdown(),
  };
}

async function fileExporter(file: string): Promise<SpanExporter> {
  const { JsonTraceSerializer } = await import("@opentelemetry/otlp-transformer");
  let fd: number;
  try {
    // Only the owner may see ids and addresses.
    fd = openSync(file, "a", 0o600);
  } catch (cause) {
    throw invalidConfig(`--trace ${file} cannot be written: ${String(cause)}`, undefined, cause);
  }
  const stream = createWriteStream(file, { fd });
  stream.on("error", () => {});
  return {
    export(spans, done) {
      const line = JsonTraceSerializer.serializeRequest(spans) ?? new Uint8Array();
      stream.write(Buffer.concat([line, Buffer.from("\n")]), (error) =>
        done(error ? { code: FAILED, error } : { code: SUCCESS }),
      );
    },
    shutdown: () =>
      new Promise((resolve) => (stream.destroyed ? resolve() : stream.end(() => resolve()))),
  };
}

/** Values of `ExportResultCode` of `@opentelemetry/core`. */
const [SUCCESS, FAILED] = [0, 1];

/** Logs the first lost batch and each tenfold. */
function reporting(exporter: SpanExporter, to: string, log: Log): SpanExporter {
  let losses = 0;
  return {
    export: (spans, done) =>
      exporter.export(spans, ({ code, error }) => {
        if (code !== SUCCESS) losses += 1;
        if (code !== SUCCESS && /^10*$/.test(String(losses)))
          log.warn("spans-dropped", { to, why: error?.message, losses });
        // A failure would end the other exporter's wait.
        done({ code: SUCCESS });
      }),
    shutdown: () => exporter.shutdown(),
  };
}

function collectorUrl(env: Readonly<Record<string, string | undefined>>): URL | undefined {
  const text = env["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] || env["OTEL_EXPORTER_OTLP_ENDPOINT"];
  if (!text) return undefined;
  const protocol =
    env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] || env["OTEL_EXPORTER_OTLP_PROTOCOL"] || "http/json";
  if (protocol !== "http/json")
    throw invalidConfig(
      `OTEL_EXPORTER_OTLP_PROTOCOL is ${protocol}; spans are sent as http/json`,
      "a collector takes http/json at the port of OTLP over HTTP, 4318 by default",
    );
  if (URL.canParse(text) && /^https?:/.test(text)) return new URL(text);
  throw invalidConfig(`OTEL_EXPORTER_OTLP_ENDPOINT is "${text}", which is no HTTP URL`);
}
