import { createHash } from "node:crypto";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import {
  type KvCacheKind,
  type KvTransferParams,
  type SideChannel,
  systemRandom,
  type Transport,
} from "@kv/interface";
import {
  type AgentMetadata,
  decodeAgentMetadata,
  decodeHandshakeReply,
  encodeAgentMetadata,
  encodeHandshakePayload,
} from "@kv/protocol";
import { readHandshakeKeys, zmqSideChannel } from "@kv/side-channel";
import { memoryNetwork, memoryTransport } from "@kv/transport-memory";
import { startInstance } from "../../../../apps/demo/src/instance/instance.js";
import { readInstanceConfig } from "../../../../apps/demo/src/instance/instance-config.js";
import { EngineServer } from "../../src/http/engine-server.js";
import { kernelBlocksOfRegion } from "../../src/protocol/region-blocks.js";
import { readRemotePrefill } from "../../src/protocol/remote-prefill.js";
import { receiveKv } from "../../src/recording/receive-kv.js";
import { createRecording } from "../../src/recording/recording.js";
import { servePrefill } from "../served.js";

/** A pair that serves requests, with real HTTP and ZMQ, and what kv-peer needs to reach it. */
export interface Pair {
  readonly prefill: EngineServer;
  readonly decode: EngineServer;
  /** Of kv-peer, on the network of the pair. */
  readonly transport: Transport;
  /** Of kv-peer. */
  readonly sideChannel: SideChannel;
  close(): Promise<void>;
  [Symbol.asyncDispose](): Promise<void>;
}

type Mode = "pull" | "push";

/**
 * P and D of this project: two instances of the demo in this process. Their model takes time and
 * computes nothing.
 */
export async function ownPair(options: {
  readonly mode: Mode;
  readonly prefillTp?: number;
  readonly decodeTp?: number;
  /** The side channels have a key. */
  readonly key?: boolean;
  readonly leaseSeconds?: number;
}): Promise<Pair> {
  const { mode, prefillTp = 1, decodeTp = 1, leaseSeconds = 30 } = options;
  const folder = mkdtempSync(join(tmpdir(), "kv-peer-pair-"));
  const keyFile = join(folder, "key");
  writeFileSync(keyFile, "ab".repeat(32), { mode: 0o600 });
  const handshakeKeys = readHandshakeKeys("key", options.key === true ? keyFile : undefined);
  const network = memoryNetwork();
  const start = (role: "prefill" | "decode", tp: number) =>
    startInstance(
      readInstanceConfig({
        role,
        tp,
        numBlocks: 128,
        graceMs: 0,
        sideChannelPort: 0,
        simulate: { forwardMsPer512Tokens: 1, layers: 2, kvHeads: 4, headDim: 8, maxModelLen: 512 },
        kvTransferConfig: {
          kv_connector: mode === "push" ? "NixlPushConnector" : "NixlPullConnector",
          kv_role: role === "prefill" ? "kv_producer" : "kv_consumer",
          kv_connector_extra_config: { kv_lease_duration: leaseSeconds },
        },
      }),
      { transport: memoryTransport({ network }), sideChannel: zmqSideChannel({ handshakeKeys }) },
    );
  const instances = await Promise.all([start("prefill", prefillTp), start("decode", decodeTp)]);
  const transport = memoryTransport({ network });
  const sideChannel = zmqSideChannel({ handshakeKeys });
  return disposable({
    prefill: new EngineServer(instances[0].url),
    decode: new EngineServer(instances[1].url),
    transport,
    sideChannel,
    async close() {
      await Promise.all(instances.map((instance) => instance.close()));
      await sideChannel.close();
      await transport.close();
      rmSync(folder, { recursive: true, force: true });
    },
  });
}

function disposable<P extends Omit<Pair, typeof Symbol.asyncDispose>>(pair: P): P & Pair {
  return { ...pair, [Symbol.asyncDispose]: () => pair.close() };
}

const fixtures = new URL("../../../protocol/fixtures/wire/", import.meta.url);

/** Handshakes that a vLLM sent, one base name per rank, and the version that sent them. */
export const RECORDED = {
  "0.31 pull": { version: "0.31.0", mode: "pull", ranks: ["versions/0.31.0"] },
  // Its metadata are those of pull.
  "0.31 push": { version: "0.31.0", mode: "push", ranks: ["versions/0.31.0"] },
  "0.32 pull": { version: "0.32.0", mode: "pull", ranks: ["handshake/pull_tp1_prefill.pp0tp0"] },
  "0.32 pull, TP 2": {
    version: "0.32.0",
    mode: "pull",
    ranks: ["handshake/pull_p2.pp0tp0", "handshake/pull_p2.pp0tp1"],
  },
  "0.32 push": { version: "0.32.0", mode: "push", ranks: ["handshake/push_p1.pp0tp0"] },
  "0.33 pull": { version: "0.33.0", mode: "pull", ranks: ["handshake/v33_pull_p1.pp0tp0"] },
  "0.33 push, TP 2": {
    version: "0.33.0",
    mode: "push",
    ranks: ["handshake/v33_push_p2.pp0tp0", "handshake/v33_push_p2.pp0tp1"],
  },
} as const satisfies Record<string, { version: string; mode: Mode; ranks: readonly string[] }>;

/**
 * A P that announces what a vLLM announced, and nothing more, and a D that reads as vLLM's does:
 * its notification is `id:n`. D's tokens depend on every byte that it read. The P serves prompts of
 * up to `length` tokens.
 */
export async function recordedPair(
  name: keyof typeof RECORDED,
  {
    length,
    leaseMs = 30_000,
    damage,
    ...engine
  }: {
    readonly length: number;
    readonly leaseMs?: number;
    /** Changes the KV that P hands out. */
    readonly damage?: (kv: Uint8Array) => void;
    readonly change?: Partial<AgentMetadata>;
    readonly blocks?: readonly number[];
    /** Given to P. */
    readonly groups?: readonly KvCacheKind[];
  },
): Promise<Pair & { readonly folder: string }> {
  const { version, mode, ranks } = RECORDED[name];
  const folder = mkdtempSync(join(tmpdir(), "kv-peer-pair-"));
  const network = memoryNetwork();
  const transports = [0, 1, 2].map((): Transport => memoryTransport({ network })) as [
    Transport,
    Transport,
    Transport,
  ];
  const [ofPrefill, ofDecode, transport] = transports;
  const sideChannel = zmqSideChannel();
  await writeRecording(folder, { ranks, mode, length, ...engine });
  const { url, close } = await servePrefill(folder, {
    sideChannel,
    leaseMs,
    groups: engine.groups,
    model: "m",
    vllmVersion: version,
    numBlocks: 64,
    change: damage,
    transport: ofPrefill,
    sideChannelHost: "127.0.0.1",
  });
  const decode = createServer((request, response) => {
    const answer = (body: unknown) => response.end(JSON.stringify(body));
    if (request.url === "/v1/models") return answer({ data: [{ id: "m" }] });
    if (request.url !== "/v1/completions") return response.writeHead(404).end();
    let text = "";
    request.on("data", (piece) => (text += piece));
    request.on("end", async () => {
      const { prompt, kv_transfer_params: params, max_tokens: tokens } = JSON.parse(text);
      try {
        answer({ choices: [{ token_ids: await continueFrom(prompt, params, tokens) }] });
      } catch (error) {
        response.writeHead(500);
        answer({ error: { message: String(error) } });
      }
    });
    return undefined;
  });
  async function continueFrom(tokens: number[], params: KvTransferParams, count: number) {
    if (params?.["do_remote_prefill"] !== true) throw new Error("this D has no model");
    const remote = readRemotePrefill(params);
    const place = { transport: ofDecode, sideChannel, random: systemRandom() };
    const kv = await receiveKv({ tokens, params, remote }, place);
    return [...createHash("sha256").update(kv).digest().subarray(0, count)];
  }
  await new Promise<void>((resolve) => decode.listen(0, "127.0.0.1", resolve));
  return disposable({
    folder,
    prefill: new EngineServer(url),
    decode: new EngineServer(`http://127.0.0.1:${(decode.address() as AddressInfo).port}`),
    transport,
    sideChannel,
    async close() {
      decode.closeAllConnections();
      decode.close();
      await close();
      await sideChannel.close();
      await Promise.all(transports.map((each) => each.close()));
      rmSync(folder, { recursive: true, force: true });
    },
  });
}

/**
 * Writes a recording with these handshakes and one prompt. `change` makes them the handshakes of
 * another engine; `blocks` has a number of blocks for each KV cache group, by default those of one
 * group of attention.
 */
async function writeRecording(
  folder: string,
  {
    ranks,
    mode,
    length,
    change = {},
    blocks,
  }: {
    ranks: readonly string[];
    mode: Mode;
    length: number;
    change?: Partial<AgentMetadata>;
    blocks?: readonly number[] | undefined;
  },
): Promise<void> {
  const writer = createRecording(folder);
  const read = (name: string) => new Uint8Array(readFileSync(new URL(name, fixtures)));
  const engines = ranks.map((rank) => {
    const { payload } = decodeHandshakeReply([read(`${rank}.rep0.bin`), read(`${rank}.rep1.bin`)]);
    const metadata = { ...decodeAgentMetadata(payload.agentMetadataBytes), ...change };
    const agentMetadataBytes = encodeAgentMetadata(metadata);
    return { metadata, frame: encodeHandshakePayload({ ...payload, agentMetadataBytes }) };
  });
  const replies = engines.map(({ frame }, at) => [frame, read(`${ranks[at]}.rep1.bin`)]);
  const metadata = engines[0]?.metadata;
  if (metadata === undefined) throw new Error("a recording has a rank");
  const counts = blocks ?? [
    Math.ceil(length / (metadata.blockSize * metadata.physicalBlocksPerLogical)),
  ];
  let next = 1;
  const blockIds = counts.map((count) => Array.from({ length: count }, () => next++));
  const rankBytes = metadata.blockLengthsBytes.reduce(
    (sum, bytes, region) => sum + bytes * kernelBlocksOfRegion(metadata, region, blockIds).length,
    0,
  );
  const kv = Uint8Array.from(
    { length: rankBytes * ranks.length },
    (_, at) => (at * 31 + (at >> 9)) % 251,
  );
  const recorded = await Promise.all(
    replies.map(async (frames, tpRank) => ({
      tpRank,
      request: await writer.frame(`p${tpRank}.req.bin`, read(`${ranks[tpRank]}.req.bin`)),
      reply: await Promise.all(
        frames.map((frame, at) => writer.frame(`p${tpRank}.rep${at}.bin`, frame)),
      ),
    })),
  );
  await writer.finish({
    version: 1,
    tpSize: ranks.length,
    prefill: { ranks: recorded },
    prompts: [
      {
        tokens: Array.from({ length }, (_, at) => at + 1),
        params: {
          do_remote_prefill: true,
          do_remote_decode: false,
          remote_block_ids: blockIds,
          remote_engine_id: metadata.engineId,
          remote_request_id: "cmpl-0",
          remote_host: "127.0.0.1",
          remote_port: 5600,
          tp_size: ranks.length,
          transfer_mode: mode,
        },
        kv: await writer.kv("prompt-0.bin", kv),
        notification: "cmpl-0:1",
      },
    ],
  });
}
