import { rmSync } from "node:fs";
import { memoryMetrics } from "@kv/connector";
import type { Log, SideChannel, Transport } from "@kv/interface";
import { readHandshakeKeys, zmqSideChannel } from "@kv/side-channel";
import { type MemoryNetwork, memoryNetwork, memoryTransport } from "@kv/transport-memory";
import { onTestFinished } from "vitest";
import {
  type HeadlessPrefill,
  type HeadlessPrefillOptions,
  openHeadlessPrefill,
} from "../src/headless/headless-prefill.js";
import { PrefillServer, type PrefillServerOptions } from "../src/headless/prefill-server.js";
import { EngineServer } from "../src/http/engine-server.js";
import { openRecording } from "../src/recording/recording.js";
import { sampleRecording } from "./sample-recording.js";

/**
 * A headless prefill server in this process with real HTTP and ZMQ, and what a decode side needs to
 * reach it.
 */
export interface Served {
  readonly folder: string;
  readonly server: EngineServer;
  readonly prefill: HeadlessPrefill;
  readonly network: MemoryNetwork;
  /** The transport of the decode side, on the same network. */
  readonly transport: Transport;
  readonly sideChannel: SideChannel;
}

/**
 * Serves the prompts of a recording to any prompt, on the loopback. `change` changes the KV that is
 * handed out.
 */
export async function servePrefill(
  folder: string,
  options: Pick<PrefillServerOptions, "model" | "vllmVersion"> &
    Omit<HeadlessPrefillOptions, "recording" | "sideChannelPort"> & {
      change: ((kv: Uint8Array) => void) | undefined;
    },
) {
  const metrics = memoryMetrics();
  const recording = await openRecording(folder);
  const kv: typeof recording.kv = async (prompt) => {
    const bytes = await recording.kv(prompt);
    options.change?.(bytes);
    return bytes;
  };
  const prefill = await openHeadlessPrefill({
    ...options,
    metrics,
    recording: { ...recording, kv },
    sideChannelPort: 0,
    anyPrompt: true,
  });
  const app = new PrefillServer({ ...options, prefill, metrics: metrics.render });
  const url = await app.listen({ host: "127.0.0.1", port: 0 });
  return {
    prefill,
    url,
    async close() {
      await app.close();
      await prefill.close();
    },
  };
}

/** Until the test ends. */
export async function serveSample(
  options: {
    lengths?: readonly number[];
    leaseMs?: number;
    numBlocks?: number;
    vllmVersion?: string;
    /** The model's name in `/v1/models`. */
    model?: string;
    factors?: Readonly<Record<string, unknown>>;
    network?: MemoryNetwork;
    /** Changes the KV that the server hands out. */
    served?: (kv: Uint8Array) => void;
    /** The host that the server announces for its side channel. */
    sideChannelHost?: string;
    log?: Log;
    /** The key of its side channel and of the decode side's. */
    handshakeKeyFile?: string;
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
  const handshakeKeys = readHandshakeKeys("key", options.handshakeKeyFile);
  const sideChannel = zmqSideChannel({ handshakeKeys });
  const folder = await sampleRecording(lengths, undefined, options.factors);
  const { prefill, url, close } = await servePrefill(folder, {
    model,
    vllmVersion,
    sideChannel,
    leaseMs,
    numBlocks,
    log: options.log,
    change: options.served,
    transport: transports[0],
    sideChannelHost: options.sideChannelHost ?? "127.0.0.1",
  });
  onTestFinished(async () => {
    await close();
    await sideChannel.close();
    await Promise.all(transports.map((transport) => transport.close()));
    rmSync(folder, { recursive: true, force: true });
  });
  const server = new EngineServer(url);
  return { folder, server, prefill, network, transport: transports[1], sideChannel };
}
