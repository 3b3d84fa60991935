import { count, each, printDoctorReport, showProgress } from "@kv/program";
import type { Command } from "commander";
import { verifyText } from "../checks/report.js";
import type { EngineServer } from "../http/engine-server.js";
import { laneEvidence } from "../verify/lane.js";
import { verify } from "../verify/verify.js";
import {
  engineServer,
  handshakeKeyOption,
  interruptSignal,
  openSideChannel,
  type SideChannelOptions,
  timeOption,
} from "./options.js";

interface Options extends SideChannelOptions {
  prefill: readonly EngineServer[];
  decode: readonly EngineServer[];
  reference?: EngineServer;
  requests: number;
  promptTokens: number;
  outputTokens: number;
  freeWithin: number;
  prefillLog?: string;
  decodeLog?: string;
  prefillHost?: string;
  decodeHost?: string;
  bytes: boolean;
  json?: true;
}

export function addVerify(program: Command): void {
  program
    .command("verify")
    .description(
      "is a deployment behind any front end really disaggregated: send prompts to it, and compare what its servers count, free and answer; exit code 1 when a check fails",
    )
    .argument(
      "<url>",
      "what clients send requests to: a router, a gateway or a proxy",
      engineServer,
    )
    .optionsGroup("Servers behind it:")
    .requiredOption(
      "--prefill <url...>",
      "the prefill servers; the first one is read for the lane",
      each(engineServer),
    )
    .requiredOption("--decode <url...>", "the decode servers, likewise", each(engineServer))
    .option(
      "--reference <url>",
      "one engine whose answers are right (default: the first prefill server)",
      engineServer,
    )
    .addOption(handshakeKeyOption())
    .optionsGroup("Prompts:")
    .option("--requests <n>", "prompts to send, one after another", count, 8)
    .option(
      "--prompt-tokens <n>",
      "their length; longer ones time the transfers better",
      count,
      512,
    )
    .option("--output-tokens <n>", "tokens of each answer", count, 8)
    .addOption(
      timeOption("--free-within <time>", "how long the servers may take to free the blocks", "10s"),
    )
    .optionsGroup("The lane:")
    .option("--prefill-log <file>", "log of the prefill server, started with UCX_PROTO_INFO=y")
    .option("--decode-log <file>", "log of the decode server, likewise")
    .option("--prefill-host <file>", "what kv-nixl doctor --json printed on the host of prefill")
    .option("--decode-host <file>", "what it printed on the host of decode")
    .option("--no-bytes", "read no memory of the servers")
    .optionsGroup("Options:")
    .option("--json", "print a JSON report")
    .action(run);
}

async function run(front: EngineServer, options: Options): Promise<void> {
  await using sideChannel = options.bytes ? openSideChannel(options) : undefined;
  const lane = await laneEvidence({
    servers: options,
    logs: { prefill: options.prefillLog, decode: options.decodeLog },
    hosts: { prefill: options.prefillHost, decode: options.decodeHost },
    sideChannel,
  });
  let answered = 0;
  using _ = showProgress("kv-peer", () => `${answered} of ${2 * options.requests} answers`);
  const report = await verify({
    ...options,
    signal: interruptSignal(),
    front,
    freeWithinMs: options.freeWithin,
    lane,
    progress: (done) => {
      answered = done;
    },
  });
  printDoctorReport(report, { json: options.json, text: verifyText });
}
