import { print, printError, runProgram } from "@kv/program";
import { runKvPlan } from "./run.js";

await runProgram("kv-plan", async () => {
  process.exitCode = await runKvPlan(process.argv.slice(2), { stdout: print, stderr: printError });
});
