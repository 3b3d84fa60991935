import { readTransferConfig } from "@kv/connector";
import { hasStates, rankGeometry } from "@kv/fleet";
import { ambient, type ConnectorModule, type KvCacheKind } from "@kv/interface";
import { type CacheKind, registerCacheKind } from "@kv/plan";
import type { AgentMetadata, RemotePrefillParams } from "@kv/protocol";
import { readRankMetadata } from "../protocol/handshake.js";
import { groupsOfRegion } from "../protocol/region-blocks.js";
import { connectorFor, countRemoteBlocks } from "../protocol/remote-prefill.js";
import {
  type HeadlessDecode,
  type HeadlessDecodeOptions,
  openHeadlessDecode,
} from "./headless-decode.js";
import type { Reach } from "./headless-engine.js";

/**
 * Settings of a headless engine whose cache has the ranks, regions and blocks of another engine.
 */
export type MatchingSettings = Required<
  Pick<HeadlessDecodeOptions, "config" | "engine" | "cache" | "regions">
> & { readonly connector: NonNullable<HeadlessDecodeOptions["connector"]> };

export interface MatchingSettingsOptions
  extends Pick<Reach, "sideChannelHost" | "sideChannelPort" | "log"> {
  readonly engineId: string;
  readonly numBlocks: number;
  /**
   * The kind of each KV cache group; blocks may then be split between the ranks of an engine with
   * another TP size. Default: every block is copied byte for byte, whatever it holds.
   */
  readonly groups?: readonly KvCacheKind[] | undefined;
  readonly connector?: ConnectorModule | undefined;
  /** How long a prefill engine keeps blocks, in ms. Undefined for a decode engine. */
  readonly leaseMs?: number | undefined;
}

/**
 * Blocks of any kind of cache, copied whole: nothing needs to be known of what they hold, and no
 * byte of them is zeroed.
 */
const WHOLE_BLOCKS: CacheKind = { name: "whole-blocks", sharding: "heads", extent: "whole" };
registerCacheKind(WHOLE_BLOCKS);

/** More KV heads on a rank than any TP size divides. */
const MAX_HEADS_PER_RANK = 64;

/**
 * Derives settings from the handshake of rank 0 of another engine: the same ranks, regions and
 * blocks, so that every block is copied byte for byte. Nothing needs to be known about the model.
 */
export function matchingSettings(
  metadata: AgentMetadata,
  remote: RemotePrefillParams,
  options: MatchingSettingsOptions,
): MatchingSettings {
  const { sideChannelHost = "127.0.0.1", sideChannelPort = 0, leaseMs, log } = options;
  const { regions } = rankGeometry(metadata, { tpRank: 0, tpSize: remote.tpSize });
  const kernels = metadata.physicalBlocksPerLogical;
  const connector = options.connector ?? connectorFor(remote);
  const headsPerRank = options.groups === undefined ? 1 : countHeads(regions, metadata.blockSize);
  const numGroups = remote.remoteBlockIds.length;
  const kinds = options.groups ?? Array.from({ length: numGroups }, () => WHOLE_BLOCKS.name);
  const [convBytes = 0, recurrentBytes = 0] = metadata.ssmSizes;
  const lease = leaseMs === undefined ? {} : { kv_lease_duration: leaseMs / 1000 };
  return {
    connector,
    config: readTransferConfig(
      {
        kv_connector: connector.name,
        kv_role: leaseMs === undefined ? "kv_consumer" : "kv_producer",
        kv_buffer_device: "cpu",
        // The engine announces the server's own hash and has no model to compare with.
        kv_connector_extra_config: { enforce_handshake_compat: false, ...lease },
      },
      {
        env: {
          VLLM_NIXL_SIDE_CHANNEL_HOST: sideChannelHost,
          VLLM_NIXL_SIDE_CHANNEL_PORT: String(sideChannelPort),
        },
        ...(log === undefined ? {} : { log }),
      },
    ),
    engine: {
      engineId: options.engineId,
      tpSize: remote.tpSize,
      ppSize: 1,
      dpRank: 0,
      // Placeholders: these values only enter a hash that is not announced.
      model: {
        model: "kv-peer",
        vllmVersion: "kv-peer",
        connectorVersion: 15,
        isHmaEnabled: true,
        speculativeConfig: null,
      },
    },
    cache: {
      groups: kinds.map((kind, group) => ({
        kind,
        layerNames: regions
          .filter((_, region) => groupsOfRegion(metadata, region, numGroups).includes(group))
          .map(({ name }) => name),
      })),
      ...(hasStates(metadata)
        ? { stateSpace: { convProjectionBytes: [convBytes], recurrentBytes } }
        : {}),
      blockSize: metadata.blockSize * kernels,
      physicalBlocksPerLogical: kernels,
      numKvHeads: remote.tpSize * headsPerRank,
      headSize: 1,
      numHiddenLayers: regions.length,
      // Not on the wire, and neither is the head size: with an unknown type, blocks count as heads
      // and tokens without padding.
      dtype: "unknown",
      cacheDtype: "auto",
      layout: metadata.kvCacheLayout,
      attentionBackend: metadata.attentionBackend,
    },
    regions: regions.map(({ name, blockLengthBytes, groupId }) => ({
      name,
      blockLengthBytes,
      groupId,
      numBlocks: options.numBlocks * kernels,
    })),
  };
}

/**
 * A number of KV heads per rank. The real number is not on the wire: this is the largest power of
 * two into which every block can be cut. Any number that the other engine's TP size divides cuts
 * the same bytes.
 */
function countHeads(
  regions: readonly { readonly blockLengthBytes: number }[],
  blockTokens: number,
): number {
  let heads = MAX_HEADS_PER_RANK;
  const divides = ({ blockLengthBytes }: { readonly blockLengthBytes: number }) =>
    blockLengthBytes % (heads * blockTokens) === 0;
  while (heads > 1 && !regions.every(divides)) heads /= 2;
  return heads;
}

export interface MatchingDecode {
  readonly decode: HeadlessDecode;
  readonly metadata: AgentMetadata;
  readonly settings: MatchingSettings;
  readonly numBlocks: number;
}

/**
 * Shakes hands with rank 0 of the P that answered with `remote`, and opens a headless decode engine
 * that matches it, holds `concurrency` such requests and announces its compatibility hash.
 *
 * @throws those of `readRankMetadata` and `openHeadlessDecode`.
 */
export async function openMatchingDecode(
  remote: RemotePrefillParams,
  concurrency: number,
  reach: Reach,
): Promise<MatchingDecode> {
  const environment = ambient(reach);
  const { transport, sideChannel, sideChannelHost, sideChannelPort } = reach;
  const { metadata, compatibilityHash } = await readRankMetadata(sideChannel, {
    host: remote.remoteHost,
    port: remote.remotePort,
  });
  const numBlocks = 1 + countRemoteBlocks(remote) * concurrency;
  const settings = matchingSettings(metadata, remote, {
    engineId: `kv-peer-${environment.random.uuid()}`,
    numBlocks,
    sideChannelHost,
    sideChannelPort,
  });
  const decode = await openHeadlessDecode({
    ...settings,
    ...environment,
    transport,
    sideChannel,
    announcedHash: compatibilityHash,
  });
  return { decode, metadata, settings, numBlocks };
}
