import { Command } from "commander";
import { examine } from "./doctor.js";

const program = new Command("kv-neuron").description("AWS Neuron for @kv/neuron.");

program
  .command("doctor")
  .description("say which parts of a Neuron instance are here: devices, driver, runtime, EFA")
  .option("--json", "one JSON list on stdout", false)
  .action(({ json }: { json: boolean }) => {
    const findings = examine({ env: process.env, root: "" });
    if (json) process.stdout.write(`${JSON.stringify(findings)}\n`);
    for (const { what, state, detail, hint } of json ? [] : findings) {
      process.stdout.write(
        `${what}: ${state} (${detail})\n${hint === undefined ? "" : `  what to do: ${hint}\n`}`,
      );
    }
    // A simulated device needs none of it; a script may ask by the status.
    const whole = findings.every(({ state }) => state !== "not there");
    process.exitCode = whole ? 0 : 1;
  });

await program.parseAsync();
