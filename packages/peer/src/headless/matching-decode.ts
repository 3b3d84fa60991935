import { readTransferConfig } from "@kv/connector";
import { delegateTo } from "@kv/connector/building-blocks";
import { hasStates, rankGeometry } from "@kv/fleet";
import {
  type Agent,
  ambient,
  type ConnectorModule,
  type ConnectorRequest,
  type KvCacheKind,
  type KvTransferParams,
  type Random,
  type Transport,
} from "@kv/interface";
import { type CacheKind, registerCacheKind } from "@kv/plan";
import { type AgentMetadata, decodeDone, type RemotePrefillParams } from "@kv/protocol";
import type { CallOptions, EngineServer } from "../http/engine-server.js";
import { groupsOfRegion } from "../protocol/cache-groups.js";
import {
  connectorFor,
  countRemoteBlocks,
  decodeRequestId,
  readRankMetadata,
  readRemotePrefill,
  sideChannelOf,
} from "../protocol/remote-engine.js";
import {
  type HeadlessDecode,
  type HeadlessDecodeOptions,
  openHeadlessDecode,
} from "./headless-decode.js";
import type { Reach } from "./headless-engine.js";

export type MatchingSettings = Required<
  Pick<HeadlessDecodeOptions, "config" | "engine" | "cache" | "regions">
> & { readonly connector: NonNullable<HeadlessDecodeOptions["connector"]> };

interface MatchingSettingsOptions
  extends Pick<Reach, "sideChannelHost" | "sideChannelPort" | "log"> {
  readonly engineId: string;
  readonly numBlocks: number;
  /**
   * Lets blocks be split between ranks of another TP size. Default: every block is copied byte for
   * byte.
   */
  readonly groups?: readonly KvCacheKind[] | undefined;
  readonly connector?: ConnectorModule | undefined;
  readonly leaseMs?: number | undefined;
}

/** The contents are unknown, so no byte is zeroed. */
const WHOLE_BLOCKS: CacheKind = { name: "whole-blocks", sharding: "heads", extent: "whole" };
registerCacheKind(WHOLE_BLOCKS);

const MAX_HEADS_PER_RANK = 64;

/** Needs only the handshake of the other engine's rank 0. */
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
        // It announces the server's hash, and has no model to compare.
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
      // The wire has neither type nor head size: blocks count as heads and tokens without padding.
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
 * The largest power of two that cuts every block. The wire lacks the real number, but any that the
 * other TP size divides cuts the same bytes.
 */
function countHeads(
  regions: readonly { readonly blockLengthBytes: number }[],
  blockTokens: number,
): number {
  let heads = MAX_HEADS_PER_RANK;
  while (heads > 1 && regions.some((each) => each.blockLengthBytes % (heads * blockTokens) !== 0))
    heads /= 2;
  return heads;
}

/** A prompt that a P keeps blocks of. */
export interface PrefilledPrompt {
  readonly tokens: readonly number[];
  readonly params: KvTransferParams;
  readonly remote: RemotePrefillParams;
}

/** @throws those of `EngineServer.prefill`; `KV_REQUEST_INVALID`. */
export async function prefillPrompt(
  server: EngineServer,
  tokens: readonly number[],
  call?: CallOptions,
): Promise<PrefilledPrompt> {
  const params = await server.prefill(tokens, call);
  return { tokens, params, remote: readRemotePrefill(params) };
}

/** D's request for the KV of a prompt. */
export function decodeRequest(
  { tokens, params, remote }: PrefilledPrompt,
  random: Random,
): ConnectorRequest {
  return {
    requestId: decodeRequestId(remote, random),
    numPromptTokens: tokens.length,
    promptTokenIds: tokens,
    kvTransferParams: params,
  };
}

export interface MatchingDecode {
  readonly decode: HeadlessDecode;
  readonly metadata: AgentMetadata;
  readonly settings: MatchingSettings;
  readonly numBlocks: number;
}

/**
 * Matches the P that answered with `remote`, and has room for `concurrency` such requests.
 *
 * @throws those of `readRankMetadata` and `openHeadlessDecode`.
 */
export async function openMatchingDecode(
  remote: RemotePrefillParams,
  concurrency: number,
  reach: Reach,
): Promise<MatchingDecode> {
  const { sideChannel, sideChannelHost, sideChannelPort, log } = reach;
  const address = sideChannelOf(remote);
  const { metadata, compatibilityHash } = await readRankMetadata(sideChannel, address);
  const numBlocks = 1 + countRemoteBlocks(remote) * concurrency;
  const engineId = `kv-peer-${ambient(reach).random.uuid()}`;
  const own = { engineId, numBlocks, sideChannelHost, sideChannelPort, log };
  const settings = matchingSettings(metadata, remote, own);
  const announcedHash = compatibilityHash;
  const decode = await openHeadlessDecode({ ...reach, ...settings, announcedHash });
  return { decode, metadata, settings, numBlocks };
}

export interface NotificationFilter {
  readonly transport: Transport;
  drop(remoteRequestId: string): void;
}

/** Hides some READs from P, as if D had died. */
export function filterNotifications(transport: Transport): NotificationFilter {
  const dropped = new Set<string>();

  function isDropped(payload: Uint8Array | undefined): boolean {
    if (payload === undefined || dropped.size === 0) return false;
    const done = decodeDone(payload);
    return done !== undefined && dropped.has(done.requestId);
  }

  function filtered(agent: Agent): Agent {
    return delegateTo(agent, {
      transfer(request) {
        if (!isDropped(request.notification)) return agent.transfer(request);
        const { notification: _, ...rest } = request;
        return agent.transfer(rest);
      },
      notify: (remote, payload) =>
        isDropped(payload) ? Promise.resolve() : agent.notify(remote, payload),
    });
  }

  return {
    drop: (remoteRequestId) => void dropped.add(remoteRequestId),
    transport: delegateTo(transport, {
      createAgent: async (options) => filtered(await transport.createAgent(options)),
    }),
  };
}
