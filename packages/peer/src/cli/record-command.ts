import { nixlTransport } from "@kv/nixl";
import { count, listOf, number, print, printJson, showProgress } from "@kv/program";
import type { Command } from "commander";
import type { EngineServer } from "../http/engine-server.js";
import { type DiffOptions, diffRecordings } from "../recording/diff.js";
import { record } from "../recording/record.js";
import { openRecording } from "../recording/recording.js";
import {
  addGroupsOptions,
  addReachOptions,
  engineServer,
  fixedPrompt,
  type GroupsOptions,
  givenGroups,
  interruptSignal,
  openSideChannel,
  type ReachOptions,
  valueTypeOption,
} from "./options.js";

interface RecordFlags extends ReachOptions, GroupsOptions {
  prefill: EngineServer;
  decode?: EngineServer;
  to: string;
  promptTokens: number[];
  outputTokens: number;
}

export function addRecord(program: Command): void {
  const command = program
    .command("record")
    .description("store the handshakes of a running pair and the KV of prompts")
    .requiredOption("--prefill <url>", "the prefill server's HTTP port", engineServer)
    .option(
      "--decode <url>",
      "a decode server that continues from the same KV; its tokens are recorded",
      engineServer,
    )
    .requiredOption("--to <folder>", "folder of the recording")
    .option(
      "--prompt-tokens <n,…>",
      "lengths of the prompts; the same lengths give the same prompts",
      listOf(count),
      [100],
    )
    .option("--output-tokens <n>", "tokens that the decode server generates per prompt", count, 16);
  addReachOptions(addGroupsOptions(command)).action(runRecord);
}

async function runRecord(flags: RecordFlags): Promise<void> {
  const { to, promptTokens } = flags;
  const groups = await givenGroups(flags);
  await using transport = nixlTransport();
  await using sideChannel = openSideChannel(flags);
  let recorded = 0;
  using _ = showProgress("kv-peer", () => `${recorded} of ${promptTokens.length} prompts recorded`);
  const manifest = await record({
    ...flags,
    folder: to,
    transport,
    sideChannel,
    groups,
    prompts: promptTokens.map(fixedPrompt),
    signal: interruptSignal(),
    progress: (done) => {
      recorded = done;
    },
  });
  const bytes = manifest.prompts.reduce((sum, { kv }) => sum + kv.lengthBytes, 0);
  print(
    `${to}: ${manifest.prompts.length} prompts, ${(bytes / 2 ** 20).toFixed(1)} MiB of KV, TP ${manifest.tpSize}\n`,
  );
}

interface DiffFlags extends GroupsOptions {
  type?: DiffOptions["valueType"];
  tolerance?: number;
  json?: true;
}

export function addDiff(program: Command): void {
  const command = program
    .command("diff")
    .description(
      "compare two recordings; exit code 1 when KV, tokens or anything that matters for pairing differs",
    )
    .argument("<one>", "folder of a recording")
    .argument("<other>", "folder of another recording")
    .addOption(valueTypeOption())
    .option("--tolerance <x>", "largest difference of two values that counts as equal", number);
  addGroupsOptions(command).option("--json", "print JSON").action(runDiff);
}

async function runDiff(one: string, other: string, flags: DiffFlags): Promise<void> {
  const { type, tolerance, json } = flags;
  const differences = await diffRecordings(await openRecording(one), await openRecording(other), {
    valueType: type,
    tolerance,
    groups: await givenGroups(flags),
  });
  const lines = differences.map(
    ({ kind, where, one, other }) => `${kind.padEnd(7)}  ${where}: ${one} | ${other}`,
  );
  if (json) printJson(differences);
  else print(`${lines.join("\n") || "no difference"}\n`);
  if (differences.some(({ kind }) => kind !== "fact")) process.exitCode = 1;
}
