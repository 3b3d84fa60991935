#!/usr/bin/env node
import tab from "@bomb.sh/tab/commander";
import { commanderOutput, packageVersion, runProgram } from "@kv/program";
import { Command } from "commander";
import { addDoctor } from "./program/doctor-command.js";
import { addServe } from "./program/serve-command.js";

const program = new Command("kv-pool")
  .description("A pool of KV blocks that plain vLLM servers read by their P2P tier.")
  .version(packageVersion(import.meta.url))
  // Subcommands inherit this when they are added; otherwise commander exits with 1.
  .exitOverride()
  .configureOutput(commanderOutput("kv-pool"));
addServe(program);
addDoctor(program);

// `complete <shell>` prints the completion of a shell.
tab(program);

await runProgram("kv-pool", () => program.parseAsync());
