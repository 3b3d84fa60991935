import { KvError } from "@kv/interface";
import { Command } from "commander";
import { addDecode } from "./decode/command.js";
import { addDoctor } from "./doctor/command.js";
import { addPrefill } from "./prefill/command.js";
import { addDiff, addRecord } from "./recording/command.js";

const program = new Command("kv-peer").description(
  "A headless prefill or decode worker that tests, loads and records a vLLM server; the doctor of a pair.",
);
for (const add of [addDoctor, addDecode, addPrefill, addRecord, addDiff]) add(program);

try {
  await program.parseAsync();
} catch (thrown) {
  const error = KvError.from(thrown, "KV_INTERNAL", "kv-peer failed");
  process.stderr.write(`kv-peer: ${error.message} [${error.code}]\n`);
  if (error.hint !== undefined) process.stderr.write(`  ${error.hint}\n`);
  process.exitCode = 2;
}
