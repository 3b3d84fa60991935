import { memoryMetrics } from "@kv/connector";
import { nixlTransport } from "@kv/nixl";
import { count, onInterrupt, port, print } from "@kv/program";
import type { Command } from "commander";
import { openHeadlessPrefill } from "../headless/headless-prefill.js";
import { PrefillServer } from "../headless/prefill-server.js";
import { openRecording } from "../recording/recording.js";
import {
  addGroupsOptions,
  type GroupsOptions,
  givenGroups,
  handshakeKeyOption,
  openSideChannel,
  type ReachOptions,
  timeOption,
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
  const command = program
    .command("prefill")
    .description("a prefill worker without a model: serve the KV of a recording to decode workers")
    .requiredOption("--from <folder>", "the recording's folder")
    .option("--host <host>", "address to listen on", "127.0.0.1")
    .option("--port <port>", "HTTP port; 0 takes a free one", port, 8100)
    .option("--side-channel-host <host>", "host that decode workers shake hands with", "127.0.0.1")
    .option(
      "--side-channel-port <port>",
      "port of the side channel; 0 takes a free one",
      port,
      5600,
    )
    .addOption(handshakeKeyOption())
    .addOption(timeOption("--lease <time>", "how long blocks are kept for a decode worker", "30s"));
  addGroupsOptions(command)
    .option("--blocks <n>", "blocks of the cache", count, 256)
    .option(
      "--any-prompt",
      "serve prompts that were not recorded with the KV of recorded ones: for load tests, not for answers",
    )
    .action(serve);
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
