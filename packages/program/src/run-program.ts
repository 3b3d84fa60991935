import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { KvError } from "@kv/interface";
import { print, printError } from "./print.js";

/**
 * Exit codes of the programs: 0, or 1 when a check, a limit or a comparison failed, or 2 for a
 * wrong call and for a program that could not run.
 */
export const EXIT_CODES = { ok: 0, failed: 1, couldNotRun: 2 } as const;

/**
 * Runs a program's main function. A `KvError` is printed as `program: message [CODE]` with its hint
 * on the next line. The errors and help of commander, which has printed them already (with
 * `commanderOutput`), give their exit codes only (commander with `exitOverride`). A reader of the
 * output that goes away (`| head -1`) ends the program quietly; stdout that cannot be written, such
 * as a file on a full disk, ends it with an error.
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
  // What cannot be written to stderr is lost: there is nowhere to say so.
  process.stderr.on("error", () => {});
  try {
    await main();
  } catch (thrown) {
    process.exitCode = reportFailure(name, thrown);
  }
}

/**
 * As `runProgram` handles what a main function throws: writes the error, to stderr by default, and
 * returns the exit code.
 */
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

/** The widest line of a program's help, in columns. */
const HELP_COLUMNS = 100;

/**
 * For commander's `configureOutput`: its errors (`error: message`, then advice) are printed as
 * `reportFailure` prints a `KvError`, with the code `KV_CONFIG_INVALID`; the help has the width of
 * the terminal, 100 columns at most. `name`: the program's.
 */
export function commanderOutput(name: string) {
  const width = () => Math.min(process.stdout.columns ?? HELP_COLUMNS, HELP_COLUMNS);
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

/** After Ctrl-C: how long a program may take to close what is open. */
const INTERRUPTED_MS = 900;

/**
 * Calls `stop` at the first Ctrl-C (SIGINT), to close what is open. A program that has not ended
 * 0.9 s later, such as one that waits for a server that does not answer, is ended then with exit
 * code 130; a second Ctrl-C ends it at once.
 */
export function onInterrupt(stop: () => unknown): void {
  process.once("SIGINT", () => {
    process.once("SIGINT", () => process.exit(130));
    setTimeout(() => process.exit(130), INTERRUPTED_MS).unref();
    stop();
  });
}

/**
 * The version of the package that a module belongs to, from the nearest `package.json` above it.
 * `module`: `import.meta.url`.
 */
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
