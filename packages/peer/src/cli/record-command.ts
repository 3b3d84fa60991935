import { nixlTransport } from "@kv/nixl";
import { print, printJson, showProgress } from "@kv/program";
import type { Command } from "commander";
import type { EngineServer } from "../http/engine-server.js";
import { type DiffOptions, diffRecordings } from "../recording/diff.js";
import { record } from "../recording/record.js";
import { openRecording } from "../recording/recording.js";
import {
  addPeerCommand,
  fixedPrompt,
  type GroupsOptions,
  givenGroups,
  interruptSignal,
  openSideChannel,
  type ReachOptions,
} from "./options.js";

interface RecordFlags extends ReachOptions, GroupsOptions {
  prefill: EngineServer;
  decode?: EngineServer;
  to: string;
  promptTokens: number[];
  outputTokens: number;
}

export function addRecord(program: Command): void {
  addPeerCommand(program, "record").action(runRecord);
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
  addPeerCommand(program, "diff")
    .argument("<one>", "folder of a recording")
    .argument("<other>", "folder of another recording")
    .action(runDiff);
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
