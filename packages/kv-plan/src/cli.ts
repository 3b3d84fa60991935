import { runProgram } from "@kv/interface/program";
import { runKvPlan } from "./run.js";

await runProgram("kv-plan", async () => {
  process.exitCode = await runKvPlan(process.argv.slice(2), {
    stdout: (text) => process.stdout.write(text),
    stderr: (text) => process.stderr.write(text),
  });
});
