import { createHash } from "node:crypto";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
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
import { sendJson, startUpstream } from "@kv/testing/http/fake-upstream";
import { memoryNetwork, memoryTransport } from "@kv/transport-memory";
import { onTestFinished } from "vitest";
import { startInstance } from "../../../../apps/demo/src/instance/instance.js";
import { readInstanceConfig } from "../../../../apps/demo/src/instance/instance-config.js";
import { EngineServer } from "../../src/http/engine-server.js";
import { kernelBlocksOfRegion } from "../../src/protocol/cache-groups.js";
import { readRemotePrefill } from "../../src/protocol/remote-engine.js";
import { receiveKv } from "../../src/recording/record.js";
import { writeRecording } from "../sample-recording.js";
import { servePrefill } from "../served.js";

/** A pair that serves requests, with real HTTP and ZMQ, and what kv-peer needs to reach it. */
export interface Pair {
  readonly prefill: EngineServer;
  readonly decode: EngineServer;
  /** Of kv-peer, on the network of the pair. */
  readonly transport: Transport;
  /** Of kv-peer. */
  readonly sideChannel: SideChannel;
}

type Mode = "pull" | "push";

/**
 * P and D of this project, until the test ends: two instances of the demo in this process. Their
 * model takes time and computes nothing.
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
  onTestFinished(async () => {
    await Promise.all(instances.map((instance) => instance.close()));
    await sideChannel.close();
    await transport.close();
    rmSync(folder, { recursive: true, force: true });
  });
  const [prefill, decode] = instances;
  return {
    prefill: new EngineServer(prefill.url),
    decode: new EngineServer(decode.url),
    transport,
    sideChannel,
  };
}

interface Asked {
  readonly prompt: number[];
  readonly kv_transfer_params: KvTransferParams;
  readonly max_tokens: number;
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
  const folder = await recordingOf(ranks, { mode, length, ...engine });
  const network = memoryNetwork();
  const transports = [0, 1, 2].map((): Transport => memoryTransport({ network })) as [
    Transport,
    Transport,
    Transport,
  ];
  const [ofPrefill, ofDecode, transport] = transports;
  const sideChannel = zmqSideChannel();
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
  const decode = await startUpstream(async ({ path, json, response }) => {
    if (path === "/v1/models") return sendJson(response, { data: [{ id: "m" }] });
    if (path !== "/v1/completions") return void response.writeHead(404).end();
    const { prompt, kv_transfer_params: params, max_tokens: tokens } = json as unknown as Asked;
    try {
      sendJson(response, { choices: [{ token_ids: await continueFrom(prompt, params, tokens) }] });
    } catch (error) {
      sendJson(response, { error: { message: String(error) } }, 500);
    }
  });
  async function continueFrom(tokens: number[], params: KvTransferParams, count: number) {
    if (params?.["do_remote_prefill"] !== true) throw new Error("this D has no model");
    const remote = readRemotePrefill(params);
    const place = { transport: ofDecode, sideChannel, random: systemRandom() };
    const kv = await receiveKv({ tokens, params, remote }, place);
    return [...createHash("sha256").update(kv).digest().subarray(0, count)];
  }
  onTestFinished(async () => {
    await decode.close();
    await close();
    await sideChannel.close();
    await Promise.all(transports.map((each) => each.close()));
    rmSync(folder, { recursive: true, force: true });
  });
  return {
    folder,
    prefill: new EngineServer(url),
    decode: new EngineServer(decode.url),
    transport,
    sideChannel,
  };
}

/**
 * Writes a recording with these handshakes and one prompt. `change` makes them the handshakes of
 * another engine; `blocks` has a number of blocks for each KV cache group, by default those of one
 * group of attention.
 */
async function recordingOf(
  names: readonly string[],
  {
    mode,
    length,
    change = {},
    blocks,
  }: {
    mode: Mode;
    length: number;
    change?: Partial<AgentMetadata>;
    blocks?: readonly number[];
  },
): Promise<string> {
  const read = (name: string) => new Uint8Array(readFileSync(new URL(name, fixtures)));
  const engines = names.map((name) => {
    const [frame, clock] = [read(`${name}.rep0.bin`), read(`${name}.rep1.bin`)];
    const { payload } = decodeHandshakeReply([frame, clock]);
    const metadata = { ...decodeAgentMetadata(payload.agentMetadataBytes), ...change };
    const agentMetadataBytes = encodeAgentMetadata(metadata);
    const reply = [encodeHandshakePayload({ ...payload, agentMetadataBytes }), clock];
    return { metadata, request: read(`${name}.req.bin`), reply };
  });
  const metadata = engines[0]?.metadata;
  if (metadata === undefined) throw new Error("a recording has a rank");
  const blockTokens = metadata.blockSize * metadata.physicalBlocksPerLogical;
  let next = 1;
  const blockIds = (blocks ?? [Math.ceil(length / blockTokens)]).map((count) =>
    Array.from({ length: count }, () => next++),
  );
  const rankBytes = metadata.blockLengthsBytes.reduce(
    (sum, bytes, region) => sum + bytes * kernelBlocksOfRegion(metadata, region, blockIds).length,
    0,
  );
  const bytes = { length: rankBytes * names.length };
  const kv = Uint8Array.from(bytes, (_, at) => (at * 31 + (at >> 9)) % 251);
  const tokens = Array.from({ length }, (_, at) => at + 1);
  const { engineId } = metadata;
  return writeRecording({ ranks: engines, engineId, mode, prompts: [{ tokens, blockIds, kv }] });
}
