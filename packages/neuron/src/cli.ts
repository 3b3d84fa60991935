import tab from "@bomb.sh/tab/commander";
import { commanderOutput, count, packageVersion, printDoctorReport, runProgram } from "@kv/program";
import { Command } from "commander";
import { doctor } from "./doctor/doctor.js";
import { doctorText } from "./doctor/report.js";

const program = new Command("kv-neuron")
  .description("AWS Neuron for @kv/neuron.")
  .version(packageVersion(import.meta.url))
  .exitOverride()
  .configureOutput(commanderOutput("kv-neuron"));

program
  .command("doctor")
  .description(
    "diagnose a Neuron instance: devices, driver, runtime, EFA; exit code 1 when a check fails",
  )
  .option("--json", "print a JSON report")
  .option("--no-init", "do not initialise the runtime")
  .option("--timeout <ms>", "limit for one step of a probe", count)
  .action(
    async ({
      json,
      init,
      timeout,
    }: {
      json?: true;
      init: boolean;
      timeout?: number | undefined;
    }) => {
      const report = await doctor({ tryRuntime: init, timeoutMs: timeout });
      printDoctorReport(report, { json, text: doctorText });
    },
  );

tab(program);

await runProgram("kv-neuron", () => program.parseAsync());
