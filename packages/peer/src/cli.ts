import { KvError } from "@kv/interface";
import { Command, CommanderError } from "commander";
import { addDecode } from "./decode/command.js";
import { addDoctor } from "./doctor/command.js";
import { addPlan } from "./live-plan/command.js";
import { addPrefill } from "./prefill/command.js";
import { addDiff, addRecord } from "./recording/command.js";

/** 1 says that what was looked at is not as it should be: a script must not take a wrong call for that. */
const NOT_DONE = 2;

const program = new Command("kv-peer")
  .description(
    "A headless prefill or decode worker that tests, loads and records a vLLM server; the doctor of a pair.",
  )
  // Commands take it over when they are added. Commander ends the process with 1 otherwise.
  .exitOverride();
for (const add of [addDoctor, addDecode, addPrefill, addRecord, addDiff, addPlan]) add(program);

try {
  await program.parseAsync();
} catch (thrown) {
  // Commander has said already what is wrong, or printed the help that was asked for.
  if (thrown instanceof CommanderError) process.exitCode = thrown.exitCode === 0 ? 0 : NOT_DONE;
  else {
    const error = KvError.from(thrown, "KV_INTERNAL", "kv-peer failed");
    process.stderr.write(`kv-peer: ${error.message} [${error.code}]\n`);
    if (error.hint !== undefined) process.stderr.write(`  ${error.hint}\n`);
    process.exitCode = NOT_DONE;
  }
}
