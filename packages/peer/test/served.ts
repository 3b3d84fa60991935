import { subscribe } from "node:diagnostics_channel";
import { rmSync } from "node:fs";
import type { IncomingMessage, ServerResponse } from "node:http";
import { memoryMetrics } from "@kv/connector";
import type { Log, SideChannel, Transport } from "@kv/interface";
import { readHandshakeKeys, zmqSideChannel } from "@kv/side-channel";
import { type MemoryNetwork, memoryNetwork, memoryTransport } from "@kv/transport-memory";
import { type HeadlessPrefill, openHeadlessPrefill } from "../src/headless/headless-prefill.js";
import { PrefillServer } from "../src/headless/prefill-server.js";
import { EngineServer } from "../src/http/engine-server.js";
import { openRecording } from "../src/recording/recording.js";
import { sampleRecording } from "./sample-recording.js";

/** A headless prefill server in this process with real HTTP and ZMQ, and what a decode side needs to reach it. */
export interface Served {
  readonly folder: string;
  readonly server: EngineServer;
  readonly prefill: HeadlessPrefill;
  readonly network: MemoryNetwork;
  /** The transport of the decode side, on the same network. */
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
    /** The model's name in `/v1/models`. */
    model?: string;
    /** Added to the time of the `Date` header. */
    clockOffsetMs?: number;
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
    clockOffsetMs = 0,
  } = options;
  const network = options.network ?? memoryNetwork();
  const transports = [memoryTransport({ network }), memoryTransport({ network })] as const;
  const handshakeKeys = readHandshakeKeys("key", options.handshakeKeyFile);
  const sideChannel = zmqSideChannel({ handshakeKeys });
  const folder = await sampleRecording(lengths, undefined, options.factors);
  const metrics = memoryMetrics();
  const recording = await openRecording(folder);
  const prefill = await openHeadlessPrefill({
    recording: {
      ...recording,
      async kv(prompt) {
        const kv = await recording.kv(prompt);
        options.served?.(kv);
        return kv;
      },
    },
    metrics,
    transport: transports[0],
    sideChannel,
    sideChannelHost: options.sideChannelHost ?? "127.0.0.1",
    sideChannelPort: 0,
    leaseMs,
    numBlocks,
    anyPrompt: true,
    log: options.log,
  });
  const app = new PrefillServer({ prefill, model, vllmVersion, metrics: metrics.render });
  if (clockOffsetMs !== 0) {
    subscribe("http.server.request.start", (message) => {
      const { request, response } = message as { request: IncomingMessage; response: ServerResponse };
      if (request.headers.host === new URL(url).host)
        response.setHeader("date", new Date(Date.now() + clockOffsetMs).toUTCString());
    });
  }
  const url = await app.listen({ host: "127.0.0.1", port: 0 });
  return {
    folder,
    server: new EngineServer(url),
    prefill,
    network,
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
