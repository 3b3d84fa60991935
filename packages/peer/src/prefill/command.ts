import { zmqSideChannel } from "@kv/connector";
import { nixlTransport } from "@kv/nixl";
import { type Command, Option } from "commander";
import { count, duration, port } from "../option-values.js";
import { openRecording } from "../recording/recording.js";
import { openHeadlessPrefill } from "./headless-prefill.js";
import { prefillServer } from "./prefill-server.js";

interface Options {
  from: string;
  host: string;
  port: number;
  sideChannelHost: string;
  sideChannelPort: number;
  lease: number;
  blocks: number;
  anyPrompt?: true;
}

export function addPrefill(program: Command): void {
  program
    .command("prefill")
    .description("a prefill worker without a model: serve the KV of a recording to decode workers")
    .requiredOption("--from <folder>", "a recording")
    .option("--host <host>", "address to listen on", "127.0.0.1")
    .option("--port <port>", "HTTP port; 0 takes a free one", port, 8100)
    .option("--side-channel-host <host>", "what decode workers are told", "127.0.0.1")
    .option("--side-channel-port <port>", "0 takes a free one", port, 5600)
    .addOption(
      new Option("--lease <time>", "how long blocks wait for a reader")
        .argParser(duration)
        .default(30_000, "30s"),
    )
    .option("--blocks <n>", "blocks of the cache", count, 256)
    .option(
      "--any-prompt",
      "serve prompts that were not recorded with KV of others: for loads, not for answers",
    )
    .action(serve);
}

async function serve(options: Options): Promise<void> {
  const recording = await openRecording(options.from);
  const transport = nixlTransport();
  const sideChannel = zmqSideChannel();
  const prefill = await openHeadlessPrefill({
    recording,
    transport,
    sideChannel,
    sideChannelHost: options.sideChannelHost,
    sideChannelPort: options.sideChannelPort,
    leaseMs: options.lease,
    numBlocks: options.blocks,
    anyPrompt: options.anyPrompt === true,
  });
  const { model = "recorded", vllmVersion = "0.0.0" } = recording.manifest.prefill;
  const [rank0] = await recording.handshakes(recording.manifest.prefill);
  const blockSize = (rank0?.metadata.blockSize ?? 0) * (rank0?.metadata.physicalBlocksPerLogical ?? 1);
  // As vLLM makes it.
  const newRequestId = (given = crypto.randomUUID() as string) =>
    `cmpl-${given}-0-${crypto.randomUUID().slice(0, 8)}`;
  const app = prefillServer({ prefill, model, vllmVersion, blockSize, newRequestId });
  const url = await app.listen({ host: options.host, port: options.port });
  process.stdout.write(
    `kv-peer prefill ready ${url} with ${recording.manifest.prompts.length} prompts of ${options.from}\n`,
  );
  const stop = async () => {
    await app.close();
    await prefill.close();
    await sideChannel.close();
    await transport.close();
  };
  for (const signal of ["SIGTERM", "SIGINT"] as const) process.once(signal, () => void stop());
}
