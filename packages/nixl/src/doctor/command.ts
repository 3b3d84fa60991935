import { type Command, InvalidArgumentError } from "commander";
import { doctor } from "./doctor.js";
import { reportText } from "./report.js";

interface Options {
  library?: string;
  backend?: string[];
  pair: boolean;
  timeout?: number;
  json?: true;
}

export function addDoctor(program: Command): void {
  program
    .command("doctor")
    .description(
      "look at everything that decides whether NIXL works here, and how fast; exit code 1 when something fails",
    )
    .option("--library <path>", "libnixl_capi.so to look at")
    .option("--backend <names>", "backends to look at, separated by commas", (text) => text.split(","))
    .option("--no-pair", "do not move bytes between two processes")
    .option("--timeout <ms>", "longest that one probe may take", readMs)
    .option("--json", "print a JSON report")
    .action(async ({ library, backend, pair, timeout, json }: Options) => {
      const report = await doctor({
        pair,
        ...(library === undefined ? {} : { library }),
        ...(backend === undefined ? {} : { backends: backend }),
        ...(timeout === undefined ? {} : { timeoutMs: timeout }),
      });
      process.stdout.write(json ? `${JSON.stringify(report, null, 2)}\n` : reportText(report));
      if (report.verdict === "fail") process.exitCode = 1;
    });
}

function readMs(text: string): number {
  const value = Number(text);
  if (!Number.isSafeInteger(value) || value < 1 || value > 2 ** 31 - 1)
    throw new InvalidArgumentError("milliseconds");
  return value;
}
