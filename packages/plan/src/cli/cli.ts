import { runKvPlan } from "./run.js";

process.exitCode = await runKvPlan(process.argv.slice(2), {
  stdout: (text) => process.stdout.write(text),
  stderr: (text) => process.stderr.write(text),
});
