import tab from "@bomb.sh/tab/commander";
import {
  commanderOutput,
  count,
  each,
  listOf,
  oneOf,
  packageVersion,
  print,
  printDoctorReport,
  printError,
  runProgram,
} from "@kv/program";
import { Command, Option } from "commander";
import { addBench } from "./bench/command.js";
import { doctor } from "./doctor/doctor.js";
import { doctorText } from "./doctor/report.js";
import {
  installNixl,
  PLUGIN_DEPENDENCIES,
  type PluginDependency,
  useNixl,
} from "./install/install.js";
import { type Cuda, DEFAULT_VERSION } from "./install/wheels.js";
import { findLibrary } from "./library/find-library.js";

interface DoctorCommandOptions {
  library?: string | undefined;
  backend?: string[] | undefined;
  pair: boolean;
  timeout?: number | undefined;
  json?: true | undefined;
}

interface InstallCommandOptions {
  readonly version: string;
  readonly cuda: Cuda;
  readonly wheel?: string;
  readonly with: PluginDependency[];
  readonly force?: true;
}

const program = new Command("kv-nixl")
  .description("NVIDIA NIXL for @kv/nixl.")
  .version(packageVersion(import.meta.url))
  // --version before the command is the program's; after `install` it is NIXL's.
  .enablePositionalOptions()
  .exitOverride()
  .configureOutput(commanderOutput("kv-nixl"));

const cudaOption = () =>
  new Option("--cuda <major>", "major version of CUDA that the wheel is built for: 12 or 13")
    .argParser((text) => Number(oneOf("12", "13")(text)))
    .default(12);

program
  .command("install")
  .description(
    "download the pinned NIXL wheel with pip, or take --wheel, and unpack its libraries into the user's cache",
  )
  .option("--version <version>", "version of NIXL", DEFAULT_VERSION)
  .addOption(cudaOption())
  .option(
    "--wheel <file>",
    "the wheel, on a machine without a package index; its SHA-256 is checked",
  )
  .addOption(
    new Option(
      "--with <name>",
      "also install libraries that a plugin needs from outside the wheel: libfabric (11 MB; NVIDIA's licence for CUDA's runtime)",
    )
      .argParser(each(oneOf(...PLUGIN_DEPENDENCIES)))
      .default([], "none"),
  )
  .option(
    "--force",
    "install NIXL again and replace the installation, such as when a file is damaged",
  )
  .action(async (options: InstallCommandOptions) => {
    const onProgress = (line: string) => printError(`${line}\n`);
    const { library, existed } = await installNixl({ ...options, onProgress });
    if (existed)
      onProgress(
        "NIXL is installed already, and its files were not checked: --force installs it again",
      );
    print(`${library}\n`);
  });

program
  .command("use")
  .description("select one of the installed versions of NIXL; `install` selects what it installs")
  .argument("[version]", "version of NIXL", DEFAULT_VERSION)
  .addOption(cudaOption())
  .action(async (version: string, { cuda }: { cuda: Cuda }) => {
    print(`${await useNixl(version, cuda)} is used from now on\n`);
  });

program
  .command("where")
  .description("print the path of the NIXL library that would be used")
  .action(async () => {
    print(`${await findLibrary()}\n`);
  });

program
  .command("doctor")
  .description(
    "check everything that decides whether NIXL works on this machine, and how fast; exit code 1 when a check fails",
  )
  .option("--library <path>", "path of the libnixl_capi.so to check")
  .option("--backend <names>", "backends to check, separated by commas", listOf(String))
  .option("--no-pair", "do not move bytes between two processes")
  .option("--timeout <ms>", "the longest that one probe may take", count)
  .option("--json", "print a JSON report")
  .action(async ({ library, backend, pair, timeout, json }: DoctorCommandOptions) => {
    const report = await doctor({ pair, library, backends: backend, timeoutMs: timeout });
    printDoctorReport(report, { json, text: doctorText });
  });

addBench(program);

// `complete <shell>` prints the completion of a shell.
tab(program);

await runProgram("kv-nixl", () => program.parseAsync());
