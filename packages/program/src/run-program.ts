import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { KvError } from "@kv/interface";
import { print, printError, terminalColumns } from "./print.js";

/**
 * 0; 1 when a check, a limit or a comparison failed; 2 for a wrong call or a program that could not
 * run.
 */
export const EXIT_CODES = { ok: 0, failed: 1, couldNotRun: 2 } as const;

/**
 * Runs a main function and prints its `KvError` as `program: message [CODE]`, with the hint below.
 * Commander has printed its own errors and help (`commanderOutput`, `exitOverride`). A reader that
 * goes away (`| head -1`) ends the program quietly; a full disk ends it with an error.
 */
export async function runProgram(name: string, main: () => unknown): Promise<void> {
  process.stdout.on("error", (error: NodeJS.ErrnoException) => {
    if (error.code === "EPIPE") process.exit();
    const unwritten = new KvError(
      "KV_CONFIG_INVALID",
      `stdout cannot be written: ${error.message}`,
    );
    process.exit(reportFailure(name, unwritten));
  });
  // Nowhere is left to report a failure of stderr.
  process.stderr.on("error", () => {});
  try {
    await main();
  } catch (thrown) {
    process.exitCode = reportFailure(name, thrown);
  }
}

/** Writes an error as `runProgram` does, and returns the exit code. */
export function reportFailure(name: string, thrown: unknown, write = printError): number {
  const { code, exitCode } = (thrown ?? {}) as {
    readonly code?: unknown;
    readonly exitCode?: unknown;
  };
  if (typeof code === "string" && code.startsWith("commander."))
    return exitCode === 0 ? EXIT_CODES.ok : EXIT_CODES.couldNotRun;
  const error = KvError.from(thrown, "KV_INTERNAL", `${name} failed`);
  write(`${name}: ${error.message} [${error.code}]\n`);
  if (error.hint !== undefined) write(`  ${error.hint}\n`);
  return EXIT_CODES.couldNotRun;
}

const HELP_COLUMNS = 100;

/**
 * Options of commander's `configureOutput`: its errors are printed as `reportFailure` prints
 * `KV_CONFIG_INVALID`. `name`: the program's.
 */
export function commanderOutput(name: string) {
  const width = () => Math.min(terminalColumns() ?? HELP_COLUMNS, HELP_COLUMNS);
  return {
    getOutHelpWidth: width,
    getErrHelpWidth: width,
    writeOut: print,
    writeErr: printError,
    outputError(text: string, write: (text: string) => void): void {
      const [message = "", ...advice] = text.trimEnd().split("\n");
      write(`${name}: ${message.replace(/^error: /, "")} [KV_CONFIG_INVALID]\n`);
      for (const line of advice) write(`  ${line}\n`);
    },
  };
}

const INTERRUPTED_MS = 900;

/**
 * Calls `stop` at the first Ctrl-C (SIGINT). A program that has not ended `limitMs` later (0.9 s), or
 * a second Ctrl-C, ends with exit code 130.
 */
export function onInterrupt(stop: () => unknown, limitMs = INTERRUPTED_MS): void {
  process.once("SIGINT", () => {
    process.once("SIGINT", () => process.exit(130));
    setTimeout(() => process.exit(130), limitMs).unref();
    stop();
  });
}

/** The version in the nearest `package.json` above `module`, an `import.meta.url`. */
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
