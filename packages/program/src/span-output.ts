import { createWriteStream, openSync } from "node:fs";
import { KvError, type Log } from "@kv/interface";

/** Where a program's spans go: what `openSpanOutput` opened. */
export interface SpanOutput {
  /**
   * Writes spans in OTLP JSON (`ExportTraceServiceRequest`), one line without its break. Does not
   * wait, and does not throw.
   */
  readonly write: (line: string) => void;
  /** Resolves when everything was written or dropped. */
  close(): Promise<void>;
}

/** Bytes that wait for a slow file or collector, at most. What comes after that is dropped. */
const MAX_WAITING_BYTES = 16 * 2 ** 20;
const POST_TIMEOUT_MS = 10_000;

/**
 * Opens the outputs for spans that a program was asked for: `file`, which it appends to, and the
 * collector of `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, or of `OTEL_EXPORTER_OTLP_ENDPOINT` with
 * `/v1/traces` (OTLP over HTTP in JSON, headers of `OTEL_EXPORTER_OTLP_HEADERS`). Undefined where
 * neither is given. Spans that cannot be written are dropped and logged. Errors:
 * `KV_CONFIG_INVALID` for a file that cannot be opened, an endpoint that is no URL, and a protocol
 * other than http/json.
 */
export function openSpanOutput(options: {
  readonly file?: string | undefined;
  readonly env: Readonly<Record<string, string | undefined>>;
  readonly log: Log;
}): SpanOutput | undefined {
  const { file, env, log } = options;
  const outputs = [
    ...(file === undefined ? [] : [fileOutput(file, log)]),
    ...(collectorUrl(env) === undefined
      ? []
      : [collectorOutput(collectorUrl(env) as URL, env, log)]),
  ];
  const [first, second] = outputs;
  if (first === undefined || second === undefined) return first;
  return {
    write(line) {
      for (const { write } of outputs) write(line);
    },
    async close() {
      await Promise.all(outputs.map((output) => output.close()));
    },
  };
}

function fileOutput(file: string, log: Log): SpanOutput {
  let fd: number;
  try {
    // Request ids and addresses are for their owner only.
    fd = openSync(file, "a", 0o600);
  } catch (cause) {
    throw new KvError("KV_CONFIG_INVALID", `--trace ${file} cannot be written: ${String(cause)}`, {
      cause,
    });
  }
  const dropped = dropLog(log, file);
  const stream = createWriteStream(file, { fd });
  stream.on("error", (error) => dropped(String(error)));
  return {
    write(line) {
      if (stream.writableLength > MAX_WAITING_BYTES || stream.errored !== null)
        dropped("the file is too slow");
      else stream.write(`${line}\n`);
    },
    close: () =>
      new Promise((resolve) => (stream.destroyed ? resolve() : stream.end(() => resolve()))),
  };
}

function collectorUrl(env: Readonly<Record<string, string | undefined>>): URL | undefined {
  const { OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: traces, OTEL_EXPORTER_OTLP_ENDPOINT: all } = env;
  const text = traces || (all ? `${all.replace(/\/$/, "")}/v1/traces` : undefined);
  if (text === undefined) return undefined;
  const protocol =
    env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] || env["OTEL_EXPORTER_OTLP_PROTOCOL"] || "http/json";
  if (protocol !== "http/json")
    throw new KvError(
      "KV_CONFIG_INVALID",
      `OTEL_EXPORTER_OTLP_PROTOCOL is ${protocol}; spans are sent as http/json`,
      { hint: "a collector takes http/json at the port of OTLP over HTTP, 4318 by default" },
    );
  if (URL.canParse(text) && /^https?:/.test(text)) return new URL(text);
  throw new KvError(
    "KV_CONFIG_INVALID",
    `OTEL_EXPORTER_OTLP_ENDPOINT is "${all ?? traces}", which is no HTTP URL`,
  );
}

function collectorOutput(
  url: URL,
  env: Readonly<Record<string, string | undefined>>,
  log: Log,
): SpanOutput {
  const pairs = (env["OTEL_EXPORTER_OTLP_HEADERS"] ?? "")
    .split(",")
    .filter((pair) => pair.includes("="));
  const headers = Object.fromEntries(
    pairs.map((pair) => [
      pair.slice(0, pair.indexOf("=")).trim(),
      pair.slice(pair.indexOf("=") + 1).trim(),
    ]),
  );
  const dropped = dropLog(log, url.origin);
  let waitingBytes = 0;
  let sent = Promise.resolve();
  async function post(body: string): Promise<void> {
    try {
      const { ok, status } = await fetch(url, {
        method: "POST",
        headers: { ...headers, "content-type": "application/json" },
        body,
        signal: AbortSignal.timeout(POST_TIMEOUT_MS),
      });
      if (!ok) dropped(`status ${status}`);
    } catch (error) {
      const { cause } = error as { cause?: unknown };
      dropped(String(cause ?? error));
    }
    waitingBytes -= body.length;
  }
  return {
    write(line) {
      if (waitingBytes > MAX_WAITING_BYTES) return dropped("the collector is too slow");
      waitingBytes += line.length;
      sent = sent.then(() => post(line));
    },
    close: () => sent,
  };
}

/** Logs the first loss, and each tenfold of it. */
function dropLog(log: Log, to: string): (why: string) => void {
  let losses = 0;
  return (why) => {
    losses += 1;
    if (/^10*$/.test(String(losses))) log.warn("spans-dropped", { to, why, losses });
  };
}
