import { print, printJson } from "@kv/program";
import type { Command } from "commander";
import { compareWire, wireText } from "../wire/compare-wire.js";
import { readWire } from "../wire/read-wire.js";
import { addPeerCommand } from "./options.js";

export function addWire(program: Command): void {
  addPeerCommand(program, "wire")
    .argument(
      "<wheel-or-tree>",
      "a wheel of vLLM, or a folder that has vllm/ in it; its code is not executed",
    )
    .action(async (wheelOrTree: string, { json }: { json?: true }) => {
      const report = compareWire(await readWire(wheelOrTree));
      if (json) printJson(report);
      else print(wireText(report));
      if (report.differences.length > 0) process.exitCode = 1;
    });
}
