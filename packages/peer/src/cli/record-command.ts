import { nixlTransport } from "@kv/nixl";
import { count, listOf, number, print, printJson } from "@kv/program";
import { type Command, Option } from "commander";
import { serverUrl } from "../doctor/target.js";
import { EngineServer } from "../http/engine-server.js";
import { type DiffOptions, diffRecordings } from "../recording/diff.js";
import { record } from "../recording/record.js";
import { openRecording } from "../recording/recording.js";
import {
  addGroupsOptions,
  addReachOptions,
  type GroupsOptions,
  givenGroups,
  openSideChannel,
  type ReachOptions,
} from "./options.js";

interface RecordFlags extends ReachOptions, GroupsOptions {
  prefill: string;
  decode?: string;
  to: string;
  promptTokens: number[];
  outputTokens: number;
}

export function addRecord(program: Command): void {
  const command = program
    .command("record")
    .description("store the handshakes of a running pair and the KV of prompts")
    .requiredOption("--prefill <url>", "the prefill server's HTTP port", serverUrl)
    .option(
      "--decode <url>",
      "a decode server that continues from the same KV; its tokens are recorded",
      serverUrl,
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
  const { prefill, decode, to, promptTokens } = flags;
  const groups = await givenGroups(flags);
  await using transport = nixlTransport();
  await using sideChannel = openSideChannel(flags);
  const manifest = await record({
    ...flags,
    folder: to,
    prefill: new EngineServer(prefill),
    decode: decode === undefined ? undefined : new EngineServer(decode),
    transport,
    sideChannel,
    groups,
    prompts: promptTokens.map(fixedPrompt),
  });
  const bytes = manifest.prompts.reduce((sum, { kv }) => sum + kv.lengthBytes, 0);
  print(
    `${to}: ${manifest.prompts.length} prompts, ${(bytes / 2 ** 20).toFixed(1)} MiB of KV, TP ${manifest.tpSize}\n`,
  );
}

/** A prompt that depends only on its length and its index, so that recordings can be compared. */
function fixedPrompt(length: number, index: number): number[] {
  return Array.from({ length }, (_, at) => ((7 * at * at + 3 * at + 11 + 37 * index) % 900) + 10);
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
    .addOption(
      new Option(
        "--type <type>",
        "type of the values in KV; bytes are compared when absent",
      ).choices(["float32", "float16", "bfloat16"]),
    )
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
