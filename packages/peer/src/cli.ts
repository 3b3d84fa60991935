import { KvError } from "@kv/interface";
import { Command, CommanderError } from "commander";
import { addDecode } from "./cli/decode-command.js";
import { addDoctor } from "./cli/doctor-command.js";
import { addPrefill } from "./cli/prefill-command.js";
import { addDiff, addRecord } from "./cli/record-command.js";
import { addWire } from "./cli/wire-command.js";
import { addPlan } from "./live-plan/command.js";

/** Exit code of a wrong call and of a command that could not run. Exit code 1 means that a check or a limit failed. */
const FAILED_TO_RUN = 2;

const program = new Command("kv-peer")
  .description(
    "Headless prefill and decode workers that test, load and record vLLM servers, and a doctor for a pair of them.",
  )
  // Subcommands inherit this when they are added. Otherwise commander exits with 1.
  .exitOverride();
for (const add of [addDoctor, addDecode, addPrefill, addRecord, addDiff, addPlan, addWire]) add(program);

try {
  await program.parseAsync();
} catch (thrown) {
  // Commander has already printed the error or the help.
  if (thrown instanceof CommanderError) process.exitCode = thrown.exitCode === 0 ? 0 : FAILED_TO_RUN;
  else {
    const error = KvError.from(thrown, "KV_INTERNAL", "kv-peer failed");
    process.stderr.write(`kv-peer: ${error.message} [${error.code}]\n`);
    if (error.hint !== undefined) process.stderr.write(`  ${error.hint}\n`);
    process.exitCode = FAILED_TO_RUN;
  }
}
