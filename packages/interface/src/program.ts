import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { KvError } from "./errors.js";

/**
 * `@kv/interface/program`: what the command-line programs of the packages have in common. Exit codes: 0, or 1 when a check, a limit or a
 * comparison failed, or 2 for a wrong call and for a program that could not run.
 */
export const EXIT_CODES = { ok: 0, failed: 1, couldNotRun: 2 } as const;

/**
 * Runs a program's main function. A `KvError` is printed as `program: message [CODE]` with its hint on the next line. The errors and help of
 * commander, which has printed them already, give their exit codes only (commander with `exitOverride`). A reader of the output that goes
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
