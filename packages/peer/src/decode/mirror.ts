import { type AgentMetadata, type RemotePrefillParams, readTransferConfig } from "@kv/connector";
import type { KvCacheGroup } from "@kv/interface";
import { connectorFor } from "../connector-for.js";
import { geometryOf } from "../rank-geometry.js";
import type { HeadlessDecodeOptions } from "./headless-decode.js";

export type Mirror = Required<
  Pick<HeadlessDecodeOptions, "config" | "engine" | "cache" | "regions" | "connector">
>;

export interface MirrorOptions {
  readonly engineId: string;
  /** Where a prefill engine that pushes shakes hands with this one; loopback and a free port unless given. */
  readonly sideChannelHost?: string | undefined;
  readonly sideChannelPort?: number | undefined;
  /** Logical blocks of the mirror's cache. */
  readonly numBlocks: number;
  readonly handshakeTimeoutMs?: number;
}

/**
 * The cache of a decode engine that any prefill engine can be read into: the same ranks, regions and blocks, so that each block lands as
 * it lies there, whatever is in it. Nothing has to be known of the model.
 */
export function mirrorOf(metadata: AgentMetadata, told: RemotePrefillParams, options: MirrorOptions): Mirror {
  const { sideChannelHost = "127.0.0.1", sideChannelPort = 0 } = options;
  const { regions } = geometryOf(metadata, { tpRank: 0, tpSize: told.tpSize });
  const names = regions.map(({ name }) => name);
  const isMla = metadata.attentionBackend.includes("MLA");
  const longest = Math.max(0, ...told.remoteBlockIds.map((ids) => ids.length));
  const groups = told.remoteBlockIds.map(
    (ids, group): KvCacheGroup => ({
      // A group that hands over fewer blocks than the longest holds a window.
      kind: isMla ? "mla" : ids.length < longest ? "swa" : "full",
      layerNames: names.filter((_, index) => [group, -1].includes(regions[index]?.groupId ?? 0)),
    }),
  );
  const logical = metadata.physicalBlocksPerLogical;
  return {
    config: readTransferConfig(
      {
        kv_connector: connectorFor(told).name,
        kv_role: "kv_consumer",
        kv_buffer_device: "cpu",
        // Its digest is the server's own: there is no model here to compare with.
        kv_connector_extra_config: { enforce_handshake_compat: false },
      },
      {
        env: {
          VLLM_NIXL_SIDE_CHANNEL_HOST: sideChannelHost,
          VLLM_NIXL_SIDE_CHANNEL_PORT: String(sideChannelPort),
        },
      },
    ),
    connector: connectorFor(told),
    engine: {
      engineId: options.engineId,
      tpSize: told.tpSize,
      ppSize: 1,
      dpRank: 0,
      model: {
        model: "mirror",
        vllmVersion: "mirror",
        connectorVersion: 15,
        isHmaEnabled: true,
        speculativeConfig: null,
      },
    },
    cache: {
      groups,
      blockSize: metadata.blockSize * logical,
      physicalBlocksPerLogical: logical,
      // A head per rank: how a block divides into heads does not matter to one that is copied whole.
      numKvHeads: told.tpSize,
      headSize: 1,
      numHiddenLayers: regions.length,
      dtype: "torch.bfloat16",
      cacheDtype: "auto",
      layout: metadata.kvCacheLayout,
      attentionBackend: metadata.attentionBackend,
    },
    regions: regions.map(({ name, blockLengthBytes, groupId }) => ({
      name,
      blockLengthBytes,
      groupId,
      numBlocks: options.numBlocks * logical,
    })),
  };
}
