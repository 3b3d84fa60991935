import { type KvCacheKind, KvError, type SideChannel } from "@kv/interface";
import type { RankGeometry, RegionGeometry } from "../../geometry/rank-geometry.js";
import type { Pair } from "./pair.js";

/** What the handshake of a rank tells, as `@kv/connector` decodes it. Said here anew: this package does not depend on that one. */
interface ToldRank {
  readonly engineId: string;
  readonly baseAddresses: readonly number[];
  readonly deviceId: number;
  readonly numBlocks: number;
  readonly blockLengthsBytes: readonly number[];
  readonly blockStridesBytes: readonly number[];
  readonly kvCacheLayout: RankGeometry["layout"];
  readonly blockSize: number;
  readonly attentionBackend: string;
  readonly physicalBlocksPerLogical: number;
  readonly regionNumBlocks?: readonly number[];
  readonly regionGroupIds?: readonly number[];
  readonly regionNames?: readonly string[];
  readonly regionMemoryTypes?: readonly RegionGeometry["memoryType"][];
  readonly dcpSize: number;
}

/** The part of `@kv/connector` that asks an engine: the package is loaded only when `--from` is given. */
export interface LiveClient {
  zmqSideChannel(): SideChannel;
  encodeHandshakeRequest(request: { ppRank: number; tpRank: number }): Uint8Array;
  decodeHandshakeReply(frames: readonly Uint8Array[]): {
    readonly payload: { readonly compatibilityHash: string; readonly agentMetadataBytes: Uint8Array };
  };
  decodeAgentMetadata(bytes: Uint8Array): ToldRank;
}

export interface LiveEngine {
  readonly host: string;
  readonly port: number;
  readonly tpSize: number;
}

export interface LivePairOptions {
  readonly prefill: LiveEngine;
  readonly decode: LiveEngine;
  readonly numKvHeads: number;
  readonly groups: readonly KvCacheKind[];
  readonly timeoutMs: number;
}

/** Loads the client, or says how to get it. */
export async function loadLiveClient(
  load: (name: string) => Promise<unknown> = (name) => import(name),
): Promise<LiveClient> {
  const name = "@kv/connector";
  try {
    return (await load(name)) as LiveClient;
  } catch (cause) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      "--from asks live engines, and that needs the package @kv/connector",
      {
        hint: "npm install @kv/connector",
        cause,
      },
    );
  }
}

/**
 * Asks each engine's rank (0, 0) and takes the other ranks to be like it: a vLLM listener that is asked for a rank it does not have stops
 * for good, so no other is asked. Errors: the side channel's, `KV_WIRE_MALFORMED`.
 */
export async function livePair(client: LiveClient, options: LivePairOptions): Promise<Pair> {
  const channel = client.zmqSideChannel();
  try {
    const prefill = await ask(client, channel, options.prefill, options.timeoutMs);
    const decode = await ask(client, channel, options.decode, options.timeoutMs);
    const hashes = [prefill.compatibilityHash, decode.compatibilityHash];
    return {
      title: `${name(options.prefill)} → ${name(options.decode)}`,
      numKvHeads: options.numKvHeads,
      groups: options.groups,
      windowTokens: options.groups.map(() => undefined),
      prefill: ranksLike(prefill.told, options.prefill.tpSize),
      decode: ranksLike(decode.told, options.decode.tpSize),
      assumed: [
        "every rank is like rank (0, 0), the only one that was asked; addresses are rank 0's",
        hashes[0] === hashes[1]
          ? "both run one model: their compatibility hashes are equal"
          : `both run one model, although their compatibility hashes differ (${hashes.map((hash) => hash?.slice(0, 12)).join(", ")}): as they are they would refuse one another`,
      ],
    };
  } finally {
    await channel.close();
  }
}

async function ask(client: LiveClient, channel: SideChannel, engine: LiveEngine, timeoutMs: number) {
  const { frames } = await channel.request({
    host: engine.host,
    port: engine.port,
    frames: [client.encodeHandshakeRequest({ ppRank: 0, tpRank: 0 })],
    timeoutMs,
  });
  const { payload } = client.decodeHandshakeReply(frames);
  return { ...payload, told: client.decodeAgentMetadata(payload.agentMetadataBytes) };
}

function ranksLike(told: ToldRank, tpSize: number): RankGeometry[] {
  const regions = told.baseAddresses.map((baseAddress, index): RegionGeometry => {
    const blockLengthBytes = told.blockLengthsBytes[index] ?? 0;
    return {
      name: told.regionNames?.[index] ?? `region ${index}`,
      baseAddress,
      numBlocks: told.regionNumBlocks?.[index] ?? told.numBlocks,
      blockLengthBytes,
      blockStrideBytes: told.blockStridesBytes[index] ?? blockLengthBytes,
      groupId: told.regionGroupIds?.[index] ?? 0,
      memoryType: told.regionMemoryTypes?.[index] ?? "VRAM",
    };
  });
  return Array.from({ length: tpSize }, (_, tpRank) => ({
    tpRank,
    tpSize,
    dcpSize: told.dcpSize,
    kernelBlockSize: told.blockSize,
    physicalBlocksPerLogical: told.physicalBlocksPerLogical,
    layout: told.kvCacheLayout,
    attentionBackend: told.attentionBackend,
    deviceId: tpRank,
    regions,
  }));
}

function name({ host, port }: LiveEngine): string {
  return `${host}:${port}`;
}
