import { memoryMetrics } from "@kv/connector";
import { nixlTransport } from "@kv/nixl";
import { onInterrupt, print } from "@kv/program";
import type { Command } from "commander";
import { openHeadlessPrefill } from "../headless/headless-prefill.js";
import { PrefillServer } from "../headless/prefill-server.js";
import { openRecording } from "../recording/recording.js";
import {
  addPeerCommand,
  type GroupsOptions,
  givenGroups,
  openSideChannel,
  type ReachOptions,
} from "./options.js";

interface Options extends ReachOptions, GroupsOptions {
  from: string;
  host: string;
  port: number;
  lease: number;
  blocks: number;
  anyPrompt?: true;
}

export function addPrefill(program: Command): void {
  addPeerCommand(program, "prefill").action(serve);
}

async function serve(options: Options): Promise<void> {
  const recording = await openRecording(options.from);
  const { manifest } = recording;
  const groups = await givenGroups(options);
  const transport = nixlTransport();
  const sideChannel = openSideChannel(options);
  const metrics = memoryMetrics();
  const prefill = await openHeadlessPrefill({
    metrics,
    recording,
    transport,
    sideChannel,
    sideChannelHost: options.sideChannelHost,
    sideChannelPort: options.sideChannelPort,
    leaseMs: options.lease,
    numBlocks: options.blocks,
    groups,
    anyPrompt: options.anyPrompt,
  });
  const { model = "recorded", vllmVersion = "0.0.0" } = manifest.prefill;
  const app = new PrefillServer({ prefill, model, vllmVersion, metrics: metrics.render });
  const url = await app.listen({ host: options.host, port: options.port });
  print(
    `kv-peer prefill ready ${url} with ${manifest.prompts.length} prompts of ${options.from}\n`,
  );
  const stop = async () => {
    await app.close();
    await prefill.close();
    await sideChannel.close();
    await transport.close();
  };
  process.once("SIGTERM", () => void stop());
  onInterrupt(stop);
}
