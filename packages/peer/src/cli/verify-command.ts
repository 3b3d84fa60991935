import { KvError } from "@kv/interface";
import { count, printDoctorReport } from "@kv/program";
import type { Command } from "commander";
import { verifyText } from "../checks/report.js";
import { serverUrl } from "../doctor/target.js";
import { EngineServer } from "../http/engine-server.js";
import { laneEvidence } from "../verify/lane-evidence.js";
import { verify } from "../verify/verify.js";
import {
  handshakeKeyOption,
  openSideChannel,
  type SideChannelOptions,
  timeOption,
} from "./options.js";

interface Options extends SideChannelOptions {
  prefill: string[];
  decode: string[];
  reference?: string;
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
    .argument("<url>", "what clients send requests to: a router, a gateway or a proxy", serverUrl)
    .optionsGroup("Servers behind it:")
    .requiredOption("--prefill <url...>", "the prefill servers; the first one is read for the lane")
    .requiredOption("--decode <url...>", "the decode servers, likewise")
    .option(
      "--reference <url>",
      "one engine whose answers are right (default: the first prefill server)",
      serverUrl,
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

async function run(url: string, options: Options): Promise<void> {
  const serversOf = (urls: readonly string[]) =>
    urls.map((each) => new EngineServer(serverUrl(each)));
  const [prefill, decode] = [serversOf(options.prefill), serversOf(options.decode)];
  const [p, d] = [prefill[0], decode[0]];
  if (p === undefined || d === undefined)
    throw new KvError("KV_CONFIG_INVALID", "no servers were given");
  await using sideChannel = options.bytes ? openSideChannel(options) : undefined;
  const lane = await laneEvidence({
    servers: { prefill: p, decode: d },
    logs: { prefill: options.prefillLog, decode: options.decodeLog },
    hosts: { prefill: options.prefillHost, decode: options.decodeHost },
    sideChannel,
  });
  const report = await verify({
    ...options,
    front: new EngineServer(url),
    prefill,
    decode,
    reference: options.reference === undefined ? undefined : new EngineServer(options.reference),
    freeWithinMs: options.freeWithin,
    lane,
  });
  printDoctorReport(report, { json: options.json, text: verifyText });
}
