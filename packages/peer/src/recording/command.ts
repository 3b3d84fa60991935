import { zmqSideChannel } from "@kv/connector";
import { KvError } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { type Command, Option } from "commander";
import { readTarget } from "../doctor/target.js";
import { count, counts, port } from "../option-values.js";
import { engineServer } from "../server/server.js";
import { type DiffOptions, diffRecordings } from "./diff.js";
import { record } from "./record.js";
import { openRecording } from "./recording.js";

interface RecordFlags {
  prefill: string;
  decode?: string;
  to: string;
  promptTokens: number[];
  outputTokens: number;
  sideChannelHost: string;
  sideChannelPort: number;
}

export function addRecord(program: Command): void {
  program
    .command("record")
    .description("store the KV and the handshakes of a pair that runs")
    .requiredOption("--prefill <url>", "the prefill server's HTTP port")
    .option("--decode <url>", "a decode server that goes on from the same KV; its tokens are kept")
    .requiredOption("--to <folder>", "where to")
    .option(
      "--prompt-tokens <n,…>",
      "lengths of prompts; the same lengths are the same prompts each time",
      counts,
      [100],
    )
    .option("--output-tokens <n>", "of the decode server", count, 16)
    .option("--side-channel-host <host>", "where a server that pushes finds this one", "127.0.0.1")
    .option("--side-channel-port <port>", "0 takes a free one", port, 0)
    .action(async (flags: RecordFlags) => {
      const { prefill, decode, to, promptTokens, outputTokens } = flags;
      const transport = nixlTransport();
      const sideChannel = zmqSideChannel();
      try {
        const manifest = await record({
          folder: to,
          prefill: engineServer(urlOf(prefill)),
          ...(decode === undefined ? {} : { decode: engineServer(urlOf(decode)) }),
          transport,
          sideChannel,
          sideChannelHost: flags.sideChannelHost,
          sideChannelPort: flags.sideChannelPort,
          prompts: promptTokens.map((length, index) => fixedPrompt(length, index)),
          outputTokens,
        });
        const bytes = manifest.prompts.reduce((sum, { kv }) => sum + kv.lengthBytes, 0);
        process.stdout.write(
          `${to}: ${manifest.prompts.length} prompts, ${(bytes / 2 ** 20).toFixed(1)} MiB of KV, TP ${manifest.tpSize}\n`,
        );
      } finally {
        await sideChannel.close();
        await transport.close();
      }
    });
}

interface DiffFlags {
  type?: DiffOptions["valueType"];
  tolerance?: number;
  json?: true;
}

export function addDiff(program: Command): void {
  program
    .command("diff")
    .description("what differs between two recordings; exit code 1 when KV, tokens or what pairs them do")
    .argument("<one>", "a recording's folder")
    .argument("<other>", "another's")
    .addOption(new Option("--type <type>", "of the values in KV").choices(["float32", "float16", "bfloat16"]))
    .option("--tolerance <x>", "largest difference of two values that counts as none", Number)
    .option("--json", "print JSON")
    .action(async (one: string, other: string, { type, tolerance, json }: DiffFlags) => {
      if (tolerance !== undefined && !(tolerance >= 0)) {
        throw new KvError("KV_CONFIG_INVALID", `--tolerance is ${tolerance}, not 0 or more`);
      }
      const found = await diffRecordings(await openRecording(one), await openRecording(other), {
        ...(type === undefined ? {} : { valueType: type }),
        ...(tolerance === undefined ? {} : { tolerance }),
      });
      const lines = found.map(
        ({ kind, where, one, other }) => `${kind.padEnd(7)}  ${where}: ${one} | ${other}`,
      );
      process.stdout.write(
        json ? `${JSON.stringify(found, null, 2)}\n` : `${lines.join("\n") || "no difference"}\n`,
      );
      if (found.some(({ kind }) => kind !== "fact")) process.exitCode = 1;
    });
}

/** The same each time, so that recordings can be compared. */
function fixedPrompt(length: number, index: number): number[] {
  return Array.from({ length }, (_, at) => ((7 * at * at + 3 * at + 11 + 37 * index) % 900) + 10);
}

function urlOf(given: string): string {
  const target = readTarget(given);
  if (target.kind === "server") return target.url;
  throw new KvError("KV_CONFIG_INVALID", `"${given}" is no URL`, {
    hint: `give http://${given} if it is an HTTP port`,
  });
}
