import { KvError } from "@kv/interface";
import { Command, InvalidArgumentError } from "commander";
import { addBench } from "./bench/command.js";
import { addDoctor } from "./doctor/command.js";
import { COMPANIONS, type Companion, installNixl } from "./install/install.js";
import { type Cuda, DEFAULT_VERSION } from "./install/wheels.js";
import { findLibrary } from "./library/find-library.js";

const program = new Command("kv-nixl").description("NVIDIA NIXL for @kv/nixl.");

program
  .command("install")
  .description("fetch the pinned NIXL wheel with pip and unpack its libraries into the user's cache")
  .option("--version <version>", "version of NIXL", DEFAULT_VERSION)
  .option("--cuda <major>", "CUDA the wheel is built for: 12 or 13", readCuda, 12)
  .option(
    "--with <name>",
    "also what a plugin needs from outside the wheel: libfabric (135 MB to download, 2 MB of it kept; Intel's and NVIDIA's licences)",
    readCompanion,
    [],
  )
  .option("--force", "fetch it again and replace what is there, such as when a file of it is damaged")
  .action(async (options: { version: string; cuda: Cuda; with: Companion[]; force?: true }) => {
    const onProgress = (line: string) => process.stderr.write(`${line}\n`);
    const { library, existed } = await installNixl({ ...options, onProgress });
    if (existed) onProgress("it was there already, and was not looked into: --force fetches it again");
    process.stdout.write(`${library}\n`);
  });

program
  .command("where")
  .description("print the path of the NIXL library that would be used")
  .action(async () => {
    process.stdout.write(`${await findLibrary()}\n`);
  });

addDoctor(program);
addBench(program);

try {
  await program.parseAsync();
} catch (error) {
  const known = KvError.from(error, "KV_INTERNAL", "unexpected error");
  process.stderr.write(`kv-nixl: ${known.message} [${known.code}]\n`);
  if (known.hint !== undefined) process.stderr.write(`  ${known.hint}\n`);
  process.exitCode = 1;
}

function readCompanion(value: string, before: Companion[]): Companion[] {
  const known = COMPANIONS.find((name) => name === value);
  if (known === undefined) throw new InvalidArgumentError(COMPANIONS.join(" or "));
  return [...before, known];
}

function readCuda(value: string): Cuda {
  if (value === "12") return 12;
  if (value === "13") return 13;
  throw new InvalidArgumentError("12 or 13");
}
