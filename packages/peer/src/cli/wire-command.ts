import { print, printJson } from "@kv/program";
import type { Command } from "commander";
import { compareWire } from "../wire/compare-wire.js";
import { readWire } from "../wire/read-wire.js";
import { wireText } from "../wire/wire-text.js";

export function addWire(program: Command): void {
  program
    .command("wire")
    .description(
      "report what a vLLM changed on the wire, from its sources alone; exit code 1 when it is the wire of no known version",
    )
    .argument(
      "<wheel-or-tree>",
      "a wheel of vLLM, or a folder that has vllm/ in it; its code is not executed",
    )
    .option("--json", "print a JSON report")
    .action(async (wheelOrTree: string, { json }: { json?: true }) => {
      const report = compareWire(await readWire(wheelOrTree));
      if (json) printJson(report);
      else print(wireText(report));
      if (report.differences.length > 0) process.exitCode = 1;
    });
}
