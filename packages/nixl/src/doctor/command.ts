import { count, listOf, printDoctorReport } from "@kv/program";
import type { Command } from "commander";
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
    .option("--backend <names>", "backends to check, separated by commas", listOf(String))
    .option("--no-pair", "do not move bytes between two processes")
    .option("--timeout <ms>", "the longest that one probe may take", count)
    .option("--json", "print a JSON report")
    .action(async ({ library, backend, pair, timeout, json }: Options) => {
      const report = await doctor({ pair, library, backends: backend, timeoutMs: timeout });
      printDoctorReport(report, { json, text: doctorText });
    });
}
