import tab from "@bomb.sh/tab/commander";
import { commanderOutput, packageVersion, runProgram } from "@kv/program";
import { Command } from "commander";
import { addDecode } from "./cli/decode-command.js";
import { addDoctor } from "./cli/doctor-command.js";
import { addPrefill } from "./cli/prefill-command.js";
import { addDiff, addRecord } from "./cli/record-command.js";
import { addVerify } from "./cli/verify-command.js";
import { addWatch } from "./cli/watch-command.js";
import { addWire } from "./cli/wire-command.js";
import { addPlan } from "./live-plan/command.js";

const program = new Command("kv-peer")
  .description(
    "Headless prefill and decode workers that test, load and record vLLM servers, and a doctor for a pair of them.",
  )
  .version(packageVersion(import.meta.url))
  // Subcommands inherit this when they are added; otherwise commander exits with 1.
  .exitOverride()
  .configureOutput(commanderOutput("kv-peer"));
for (const add of [
  addDoctor,
  addDecode,
  addPrefill,
  addRecord,
  addDiff,
  addPlan,
  addWire,
  addVerify,
  addWatch,
])
  add(program);

tab(program);

await runProgram("kv-peer", () => program.parseAsync());
