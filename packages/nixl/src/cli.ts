import tab from "@bomb.sh/tab/commander";
import {
  addCommand,
  commanderOutput,
  listenAddress,
  oneOf,
  packageVersion,
  print,
  printDoctorReport,
  printError,
  runProgram,
} from "@kv/program";
import { Command } from "commander";
import { benchCommand } from "./bench/command.js";
import { doctor } from "./doctor/doctor.js";
import { doctorText } from "./doctor/report.js";
import { type InstallOptions, installNixl, useNixl } from "./install/install.js";
import { type Cuda, DEFAULT_VERSION } from "./install/wheels.js";
import { findLibrary } from "./library/find-library.js";
import table from "./options.json" with { type: "json" };

interface DoctorCommandOptions {
  library?: string | undefined;
  backend?: string[] | undefined;
  pair: boolean;
  timeout?: number | undefined;
  json?: true | undefined;
}

const program = new Command("kv-nixl")
  .description("NVIDIA NIXL for @kv/nixl.")
  .version(packageVersion(import.meta.url))
  // --version before the command is the program's; after `install` it is NIXL's.
  .enablePositionalOptions()
  .exitOverride()
  .configureOutput(commanderOutput("kv-nixl"));

const add = (name: keyof typeof table.commands) =>
  addCommand(program, name, table, {
    cuda: (text) => Number(oneOf("12", "13")(text)),
    listenAddress,
    operation: oneOf("READ", "WRITE"),
    order: oneOf("contiguous", "scattered"),
  });

add("install").action(async (options: InstallOptions) => {
  const onProgress = (line: string) => printError(`${line}\n`);
  const { library, existed } = await installNixl({ ...options, onProgress });
  if (existed)
    onProgress(
      "NIXL is installed already, and its files were not checked: --force installs it again",
    );
  print(`${library}\n`);
});

add("use")
  .argument("[version]", "version of NIXL", DEFAULT_VERSION)
  .action(async (version: string, { cuda }: { cuda: Cuda }) => {
    print(`${await useNixl(version, cuda)} is used from now on\n`);
  });

add("where").action(async () => {
  print(`${await findLibrary()}\n`);
});

add("doctor").action(async ({ library, backend, pair, timeout, json }: DoctorCommandOptions) => {
  const report = await doctor({ pair, library, backends: backend, timeoutMs: timeout });
  printDoctorReport(report, { json, text: doctorText });
});

add("bench").action(benchCommand);

// `complete <shell>` prints the completion of a shell.
tab(program);

await runProgram("kv-nixl", () => program.parseAsync());
