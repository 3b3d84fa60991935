import { type KvCacheConfig, KvError, type Log, type SideChannel, type WorkerOptions } from "@kv/interface";
import type { RankGeometry } from "@kv/plan";
import {
  type CompatibilityFactors,
  compatibilityHash,
  encodeAgentMetadata,
  encodeHandshakePayload,
} from "@kv/protocol";
import { shakeHands } from "./handshake-client.js";
import type { PeerAddress } from "../peers/peer-table.js";
import type { PairSettings } from "../config/connector-settings.js";
import { describeRank, remoteGeometry } from "./rank-geometry.js";
import type { RemoteRanks } from "../peers/remote-engine.js";

/** Both ends of a handshake: what this rank tells, and how it asks another engine's ranks. */
export interface PairHandshake {
  /** The payload that the scheduler side serves. */
  payload(local: RankGeometry, agentMetadata: Uint8Array): Uint8Array;
  ask(address: PeerAddress, tpRanks: readonly number[], local: RankGeometry): Promise<RemoteRanks>;
}

export interface PairHandshakeOptions {
  readonly sideChannel: SideChannel;
  readonly settings: PairSettings;
  readonly engine: WorkerOptions["engine"];
  readonly cache: KvCacheConfig;
  /** Part of the compatibility hash: a pulling side and a pushing one do not fit. */
  readonly transferMode: "pull" | "push";
  /** Notifications of our own that this side understands; told in the extension. */
  readonly features?: readonly string[];
  readonly log: Log;
}

export function createPairHandshake(options: PairHandshakeOptions): PairHandshake {
  const { sideChannel, settings, engine, cache, log } = options;
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
    transfer_mode: options.transferMode,
  };
  const hash = compatibilityHash(factors);
  if (factors.attn_backend_name !== cache.attentionBackend) {
    log.warn("compatibility-factor-adopted", {
      factor: "attn_backend_name",
      ours: cache.attentionBackend,
      told: factors.attn_backend_name,
      givenUp:
        "the hash no longer tells these engines apart; how a head is laid out is for the plan and the peer to reconcile",
    });
  }
  /** Errors: `KV_PLAN_UNSUPPORTED` where stages could not be told apart by those who count each other's words. */
  function requireOneStage({ engineId, ppSize }: PeerAddress): void {
    // A rank of a producer frees when one word of each reading rank is there, whichever of its stages said it (vLLM 0.33 counts so).
    const staged = options.transferMode === "push" ? ppSize : engine.ppSize;
    if (staged === 1) return;
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      options.transferMode === "push"
        ? `engine ${engineId} has ${staged} pipeline stages; push serves engines with one`
        : `this engine has ${staged} pipeline stages, and engine ${engineId} counts its readers by tensor-parallel rank: only producers have stages`,
      { hint: "use pipeline_parallel_size 1 for decode workers, and for both sides of push" },
    );
  }

  return {
    payload: (local, agentMetadata) =>
      encodeHandshakePayload({
        compatibilityHash: hash,
        agentMetadataBytes: encodeAgentMetadata(
          describeRank(local, { engineId: engine.engineId, agentMetadata }),
        ),
        extension: {
          version: 1,
          factors,
          ...(options.features === undefined ? {} : { features: options.features }),
        },
        rest: {},
      }),
    async ask(address, tpRanks, local) {
      requireOneStage(address);
      const { ranks, clock, extension } = await shakeHands(address, tpRanks, {
        sideChannel,
        timeoutMs: settings.handshakeTimeoutMs,
        compatibility: {
          hash,
          factors: { ...factors },
          enforced: settings.enforceCompatibility,
          relaxed: ({ how, text, differences }) =>
            log.warn("compatibility-relaxed", {
              engineId: address.engineId,
              setting: "kv_connector_extra_config.enforce_handshake_compat",
              how,
              givenUp: text,
              differences,
            }),
        },
        portPerRank: settings.perWorkerPorts,
        ...(settings.handshakeKey === undefined ? {} : { key: settings.handshakeKey }),
      });
      const incarnation = extension?.incarnation;
      const features = extension?.features;
      return {
        ranks: ranks.map(({ ppRank, tpRank, metadata }) => {
          const { tpSize, ppSize } = address;
          const rank = ppSize === 1 ? { tpRank, tpSize } : { tpRank, tpSize, ppRank, ppSize };
          const geometry = remoteGeometry(metadata, rank, local);
          return { tpRank, geometry, agentMetadata: metadata.agentMetadata };
        }),
        clock,
        incarnation: typeof incarnation === "string" && incarnation !== "" ? incarnation : undefined,
        features: new Set(Array.isArray(features) ? features.filter((name) => typeof name === "string") : []),
      };
    },
  };
}
