import { printDoctorReport, showProgress } from "@kv/program";
import type { Command } from "commander";
import { verifyText } from "../checks/report.js";
import type { EngineServer } from "../http/engine-server.js";
import { laneEvidence } from "../verify/lane.js";
import { verify } from "../verify/verify.js";
import {
  addPeerCommand,
  engineServer,
  interruptSignal,
  openSideChannel,
  type SideChannelOptions,
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
  addPeerCommand(program, "verify")
    .argument(
      "<url>",
      "what clients send requests to: a router, a gateway or a proxy",
      engineServer,
    )
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
