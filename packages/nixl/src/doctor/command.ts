import { type Command, InvalidArgumentError } from "commander";
import { doctor } from "./doctor.js";
import { doctorText } from "./report.js";

interface Options {
  library?: string | undefined;
  backend?: string[] | undefined;
  pair: boolean;
  timeout?: number | undefined;
  json?: true | undefined;
}

/** Adds the command `doctor`. */
export function addDoctor(program: Command): void {
  program
    .command("doctor")
    .description(
      "check everything that decides whether NIXL works on this machine, and how fast; exit code 1 when a check fails",
    )
    .option("--library <path>", "path of the libnixl_capi.so to check")
    .option("--backend <names>", "backends to check, separated by commas", (text) => text.split(","))
    .option("--no-pair", "do not move bytes between two processes")
    .option("--timeout <ms>", "the longest that one probe may take", readMs)
    .option("--json", "print a JSON report")
    .action(async ({ library, backend, pair, timeout, json }: Options) => {
      const report = await doctor({ pair, library, backends: backend, timeoutMs: timeout });
      process.stdout.write(json ? `${JSON.stringify(report, null, 2)}\n` : doctorText(report));
      if (report.verdict === "fail") process.exitCode = 1;
    });
}

function readMs(text: string): number {
  const value = Number(text);
  if (!Number.isSafeInteger(value) || value < 1 || value > 2 ** 31 - 1)
    throw new InvalidArgumentError("milliseconds");
  return value;
}
