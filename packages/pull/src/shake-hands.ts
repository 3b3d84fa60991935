import {
  type CompatibilityFactors,
  compatibilityHash,
  encodeAgentMetadata,
  encodeHandshakePayload,
  type PeerAddress,
  shakeHands,
} from "@kv/connector";
import { type KvCacheConfig, KvError, type SideChannel, type WorkerOptions } from "@kv/interface";
import type { RankGeometry } from "@kv/plan";
import { describeRank, remoteGeometry } from "./rank-geometry.js";
import type { RemoteRanks } from "./remote-link.js";
import type { PullSettings } from "./settings.js";

/** Both ends of a pull handshake: what this rank tells, and how it asks another engine's ranks. */
export interface PullHandshake {
  /** The payload that the scheduler side serves. */
  payload(local: RankGeometry, agentMetadata: Uint8Array): Uint8Array;
  ask(address: PeerAddress, tpRanks: readonly number[], local: RankGeometry): Promise<RemoteRanks>;
}

export interface PullHandshakeOptions {
  readonly sideChannel: SideChannel;
  readonly settings: PullSettings;
  readonly engine: WorkerOptions["engine"];
  readonly cache: KvCacheConfig;
}

export function createPullHandshake(options: PullHandshakeOptions): PullHandshake {
  const { sideChannel, settings, engine, cache } = options;
  const factors: CompatibilityFactors = {
    vllm_version: engine.model.vllmVersion,
    nixl_connector_version: engine.model.connectorVersion,
    model: engine.model.model,
    dtype: cache.dtype,
    num_kv_heads: cache.numKvHeads,
    head_size: cache.headSize,
    num_hidden_layers: cache.numHiddenLayers,
    attn_backend_name: engine.model.hashedAttentionBackend ?? cache.attentionBackend,
    cache_dtype: cache.cacheDtype,
    is_hma_enabled: engine.model.isHmaEnabled,
    speculative_config: engine.model.speculativeConfig,
    transfer_mode: "pull",
  };
  const hash = compatibilityHash(factors);
  return {
    payload: (local, agentMetadata) =>
      encodeHandshakePayload({
        compatibilityHash: hash,
        agentMetadataBytes: encodeAgentMetadata(
          describeRank(local, { engineId: engine.engineId, agentMetadata }),
        ),
        extension: { version: 1, factors },
        rest: {},
      }),
    async ask(address, tpRanks, local) {
      if (address.ppSize > 1) {
        throw new KvError(
          "KV_PLAN_UNSUPPORTED",
          `engine ${address.engineId} has ${address.ppSize} pipeline stages; pull reads from engines with one`,
        );
      }
      const { ranks, clock, extension } = await shakeHands(address, tpRanks, {
        sideChannel,
        timeoutMs: settings.handshakeTimeoutMs,
        compatibility: { hash, factors: { ...factors }, enforced: settings.enforceCompatibility },
        portPerRank: settings.perWorkerPorts,
      });
      const incarnation = extension?.incarnation;
      return {
        ranks: ranks.map(({ tpRank, metadata }) => ({
          tpRank,
          geometry: remoteGeometry(metadata, { tpRank, tpSize: address.tpSize }, local),
          agentMetadata: metadata.agentMetadata,
        })),
        clock,
        incarnation: typeof incarnation === "string" && incarnation !== "" ? incarnation : undefined,
      };
    },
  };
}
