import { readTransferConfig } from "@kv/connector";
import type { KvCacheGroup } from "@kv/interface";
import type { AgentMetadata, RemotePrefillParams } from "@kv/protocol";
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
  /** Blocks may go to an engine of another TP size, and are cut for it. Default: they go as a whole. */
  readonly isCut?: boolean;
}

/** More heads for a rank than any TP size asks for. */
const MOST_HEADS = 64;

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
      numKvHeads: told.tpSize * (options.isCut === true ? headsOf(regions, metadata.blockSize) : 1),
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

/**
 * Heads of a rank, of which nothing is known: as many as its blocks can be cut into. Any number that the other engine's ranks divide cuts the
 * same bytes, and a plan compares the lengths of both sides. One for blocks that go as a whole.
 */
function headsOf(regions: readonly { readonly blockLengthBytes: number }[], blockTokens: number): number {
  let heads = MOST_HEADS;
  const divides = ({ blockLengthBytes }: { readonly blockLengthBytes: number }) =>
    blockLengthBytes % (heads * blockTokens) === 0;
  while (heads > 1 && !regions.every(divides)) heads /= 2;
  return heads;
}
