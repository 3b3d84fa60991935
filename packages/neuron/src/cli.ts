import tab from "@bomb.sh/tab/commander";
import { commanderOutput, packageVersion, runProgram } from "@kv/interface/program";
import { Command, InvalidArgumentError } from "commander";
import { doctor } from "./doctor/doctor.js";
import { doctorText } from "./doctor/report.js";

const program = new Command("kv-neuron")
  .description("AWS Neuron for @kv/neuron.")
  .version(packageVersion(import.meta.url))
  .exitOverride()
  .configureOutput(commanderOutput("kv-neuron"));

program
  .command("doctor")
  .description("diagnose a Neuron instance: devices, driver, runtime, EFA; exit code 1 when a check fails")
  .option("--json", "print a JSON report")
  .option("--no-init", "do not initialise the runtime")
  .option("--timeout <ms>", "limit for one step of a probe", readMs)
  .action(async ({ json, init, timeout }: { json?: true; init: boolean; timeout?: number | undefined }) => {
    const report = await doctor({ tryRuntime: init, timeoutMs: timeout });
    process.stdout.write(json ? `${JSON.stringify(report, null, 2)}\n` : doctorText(report));
    if (report.verdict === "fail") process.exitCode = 1;
  });

function readMs(text: string): number {
  const value = Number(text);
  if (Number.isSafeInteger(value) && value >= 1 && value <= 2 ** 31 - 1) return value;
  throw new InvalidArgumentError("milliseconds");
}

// `complete <shell>` prints the completion of a shell.
tab(program);

await runProgram("kv-neuron", () => program.parseAsync());
