import { createWriteStream, openSync, readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import type { Log } from "./ambient.js";
import { KvError } from "./errors.js";

/**
 * `@kv/interface/program`: what the command-line programs of the packages have in common. Exit codes: 0, or 1 when a check, a limit or a
 * comparison failed, or 2 for a wrong call and for a program that could not run.
 */
export const EXIT_CODES = { ok: 0, failed: 1, couldNotRun: 2 } as const;

/**
 * Runs a program's main function. A `KvError` is printed as `program: message [CODE]` with its hint on the next line. The errors and help of
 * commander, which has printed them already (with `commanderOutput`), give their exit codes only (commander with `exitOverride`). A reader of the output that goes
 * away (`| head -1`) ends the program quietly.
 */
export async function runProgram(name: string, main: () => unknown): Promise<void> {
  process.stdout.on("error", (error: NodeJS.ErrnoException) => {
    if (error.code === "EPIPE") process.exit();
    throw error;
  });
  try {
    await main();
  } catch (thrown) {
    process.exitCode = reportFailure(name, thrown, (text) => process.stderr.write(text));
  }
}

/** As `runProgram` handles what a main function throws: writes the error, and returns the exit code. */
export function reportFailure(name: string, thrown: unknown, write: (text: string) => void): number {
  const { code, exitCode } = (thrown ?? {}) as { readonly code?: unknown; readonly exitCode?: unknown };
  if (typeof code === "string" && code.startsWith("commander."))
    return exitCode === 0 ? EXIT_CODES.ok : EXIT_CODES.couldNotRun;
  const error = KvError.from(thrown, "KV_INTERNAL", `${name} failed`);
  write(`${name}: ${error.message} [${error.code}]\n`);
  if (error.hint !== undefined) write(`  ${error.hint}\n`);
  return EXIT_CODES.couldNotRun;
}

/**
 * For commander's `configureOutput`: its errors (`error: message`, then advice) are printed as `reportFailure` prints a `KvError`, with the code
 * `KV_CONFIG_INVALID`. `name`: the program's.
 */
export function commanderOutput(name: string): {
  outputError(text: string, write: (text: string) => void): void;
} {
  return {
    outputError(text, write) {
      const [message = "", ...advice] = text.trimEnd().split("\n");
      write(`${name}: ${message.replace(/^error: /, "")} [KV_CONFIG_INVALID]\n`);
      for (const line of advice) write(`  ${line}\n`);
    },
  };
}

/** After Ctrl-C: how long a program may take to close what is open. */
const INTERRUPTED_MS = 900;

/**
 * Calls `stop` at the first Ctrl-C (SIGINT), to close what is open. A program that has not ended 0.9 s later, such as one that waits for a server that does not
 * answer, is ended then with exit code 130; a second Ctrl-C ends it at once.
 */
export function onInterrupt(stop: () => unknown): void {
  process.once("SIGINT", () => {
    process.once("SIGINT", () => process.exit(130));
    setTimeout(() => process.exit(130), INTERRUPTED_MS).unref();
    stop();
  });
}

/** The version of the package that a module belongs to, from the nearest `package.json` above it. `module`: `import.meta.url`. */
export function packageVersion(module: string): string {
  for (let folder = new URL(".", module); ; folder = new URL("..", folder)) {
    try {
      const { version } = JSON.parse(readFileSync(new URL("package.json", folder), "utf8")) as {
        readonly version?: string;
      };
      if (version !== undefined) return version;
    } catch (error) {
      if (folder.pathname === "/")
        throw KvError.from(error, "KV_INTERNAL", `${fileURLToPath(module)} has no package`);
    }
  }
}

/** Where a program's spans go: what `openSpanOutput` opened. */
export interface SpanOutput {
  /** Writes spans in OTLP JSON (`ExportTraceServiceRequest`), one line without its break. Does not wait, and does not throw. */
  readonly write: (line: string) => void;
  /** Resolves when everything was written or dropped. */
  close(): Promise<void>;
}

/** Bytes that wait for a slow file or collector, at most. What comes after that is dropped. */
const MAX_WAITING_BYTES = 16 * 2 ** 20;
const POST_TIMEOUT_MS = 10_000;

/**
 * Opens the outputs for spans that a program was asked for: `file`, which it appends to, and the collector of
 * `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, or of `OTEL_EXPORTER_OTLP_ENDPOINT` with `/v1/traces` (OTLP over HTTP in JSON, headers of
 * `OTEL_EXPORTER_OTLP_HEADERS`). Undefined where neither is given. Spans that cannot be written are dropped and logged. Errors:
 * `KV_CONFIG_INVALID` for a file that cannot be opened, an endpoint that is no URL, and a protocol other than http/json.
 */
export function openSpanOutput(options: {
  readonly file?: string | undefined;
  readonly env: Readonly<Record<string, string | undefined>>;
  readonly log: Log;
}): SpanOutput | undefined {
  const { file, env, log } = options;
  const outputs = [
    ...(file === undefined ? [] : [fileOutput(file, log)]),
    ...(collectorUrl(env) === undefined ? [] : [collectorOutput(collectorUrl(env) as URL, env, log)]),
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
    throw new KvError("KV_CONFIG_INVALID", `--trace ${file} cannot be written: ${String(cause)}`, { cause });
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
    close: () => new Promise((resolve) => (stream.destroyed ? resolve() : stream.end(() => resolve()))),
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
      {
        hint: "a collector takes http/json at the port of OTLP over HTTP, 4318 by default",
      },
    );
  if (URL.canParse(text) && /^https?:/.test(text)) return new URL(text);
  throw new KvError(
    "KV_CONFIG_INVALID",
    `OTEL_EXPORTER_OTLP_ENDPOINT is "${all ?? traces}", which is no HTTP URL`,
  );
}

function collectorOutput(url: URL, env: Readonly<Record<string, string | undefined>>, log: Log): SpanOutput {
  const pairs = (env["OTEL_EXPORTER_OTLP_HEADERS"] ?? "").split(",").filter((pair) => pair.includes("="));
  const headers = Object.fromEntries(
    pairs.map((pair) => [pair.slice(0, pair.indexOf("=")).trim(), pair.slice(pair.indexOf("=") + 1).trim()]),
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
