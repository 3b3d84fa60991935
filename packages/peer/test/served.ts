import { rmSync } from "node:fs";
import { zmqSideChannel } from "@kv/connector";
import type { SideChannel, Transport } from "@kv/interface";
import { type MemoryNetwork, memoryNetwork, memoryTransport } from "@kv/transport-memory";
import { type HeadlessPrefill, openHeadlessPrefill } from "../src/prefill/headless-prefill.js";
import { prefillServer } from "../src/prefill/prefill-server.js";
import { openRecording } from "../src/recording/recording.js";
import { type EngineServer, engineServer } from "../src/server/server.js";
import { sampleRecording } from "./sample-recording.js";

/** A headless prefill server on real HTTP and ZMQ in this process, and what a decode side needs to reach it. */
export interface Served {
  readonly folder: string;
  readonly server: EngineServer;
  readonly prefill: HeadlessPrefill;
  /** Of the decode side, on the same network. */
  readonly transport: Transport;
  readonly sideChannel: SideChannel;
  close(): Promise<void>;
}

export async function serveSample(
  options: {
    lengths?: readonly number[];
    leaseMs?: number;
    numBlocks?: number;
    vllmVersion?: string;
    /** As it is served. */
    model?: string;
    factors?: Readonly<Record<string, unknown>>;
    network?: MemoryNetwork;
  } = {},
): Promise<Served> {
  const {
    lengths = [100],
    leaseMs = 60_000,
    numBlocks = 64,
    vllmVersion = "0.33.0",
    model = "tiny-qwen3",
  } = options;
  const network = options.network ?? memoryNetwork();
  const transports = [memoryTransport({ network }), memoryTransport({ network })] as const;
  const sideChannel = zmqSideChannel();
  const folder = await sampleRecording(lengths, undefined, options.factors);
  const prefill = await openHeadlessPrefill({
    recording: await openRecording(folder),
    transport: transports[0],
    sideChannel,
    sideChannelHost: "127.0.0.1",
    sideChannelPort: 0,
    leaseMs,
    numBlocks,
    anyPrompt: true,
  });
  let ids = 0;
  const app = prefillServer({
    prefill,
    model,
    vllmVersion,
    blockSize: 32,
    newRequestId: (given) => `cmpl-${given ?? "test"}-0-${String(ids++).padStart(8, "0")}`,
  });
  const url = await app.listen({ host: "127.0.0.1", port: 0 });
  return {
    folder,
    server: engineServer(url),
    prefill,
    transport: transports[1],
    sideChannel,
    async close() {
      await app.close();
      await prefill.close();
      await sideChannel.close();
      await Promise.all(transports.map((transport) => transport.close()));
      rmSync(folder, { recursive: true, force: true });
    },
  };
}
