import type { Clock, KvCacheConfig, Log, SideChannel, WorkerOptions } from "@kv/interface";
import type { RankGeometry } from "@kv/plan";
import {
  type CompatibilityFactors,
  compatibilityHash,
  encodeAgentMetadata,
  encodeHandshakePayload,
} from "@kv/protocol";
import type { ConnectorSettings } from "../config/connector-settings.js";
import type { EngineAddress } from "../requests/remote-request.js";
import type { ClockOffset } from "./handshake-client.js";
import { shakeHands } from "./handshake-client.js";
import { announcedInBlocksOf, describeRank, remoteGeometry } from "./rank-geometry.js";

/** The result of a handshake with an engine, validated. */
export interface RemoteRanks {
  readonly ranks: readonly RemoteRank[];
  readonly clock: ClockOffset;
  /** The engine's process; undefined for vLLM. */
  readonly incarnation: string | undefined;
  /** How often the engine has registered its KV cache; undefined for vLLM. */
  readonly registrationGeneration?: number | undefined;
  readonly fingerprint?: string | undefined;
  readonly features: ReadonlySet<string>;
}

/** One rank of a remote engine. */
export interface RemoteRank {
  readonly tpRank: number;
  readonly geometry: RankGeometry;
  readonly agentMetadata: Uint8Array;
}

/** Options of `ConnectorHandshake`. */
export interface ConnectorHandshakeOptions {
  readonly sideChannel: SideChannel;
  readonly settings: ConnectorSettings;
  /** This engine; the model's identity is part of the compatibility hash. */
  readonly engine: WorkerOptions["engine"];
  readonly cache: KvCacheConfig;
  readonly local: RankGeometry;
  /** Part of the compatibility hash: a pull engine and a push engine are incompatible. */
  readonly transferMode: "pull" | "push";
  /** Extension messages that this side understands. */
  readonly features?: readonly string[] | undefined;
  readonly clock: Clock;
  /** Gets a warning for each compatibility factor that is not compared. */
  readonly log: Log;
}

/**
 * Both ends of a worker's handshakes: the payload that this rank serves, and the queries to other
 * engines' ranks.
 */
export class ConnectorHandshake {
  readonly #options: ConnectorHandshakeOptions;
  readonly #factors: CompatibilityFactors;
  readonly #hash: string;

  constructor(options: ConnectorHandshakeOptions) {
    const { engine, cache, log } = options;
    this.#options = options;
    this.#factors = {
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
    this.#hash = compatibilityHash(this.#factors);
    const { announcedBlockSize } = options.settings;
    if (announcedBlockSize !== undefined && options.transferMode === "pull")
      log.warn("setting-not-used", {
        key: "kv_connector_extra_config.push_announced_block_size",
        value: announcedBlockSize,
        reason: "a decode worker that reads must know the real size; only push uses it",
      });
    if (this.#factors.attn_backend_name !== cache.attentionBackend) {
      log.warn("compatibility-factor-adopted", {
        factor: "attn_backend_name",
        ours: cache.attentionBackend,
        announced: this.#factors.attn_backend_name,
        consequence:
          "the hash does not distinguish these attention backends; the plan and the peer must agree on the layout within a head",
      });
    }
  }

  /** The handshake payload of this rank, for the scheduler side to serve. Throws nothing. */
  payload(agentMetadata: Uint8Array): Uint8Array {
    const { engine, features, local, settings, transferMode } = this.#options;
    const metadata = describeRank(local, { engineId: engine.engineId, agentMetadata });
    const { announcedBlockSize } = settings;
    const isAnnounced = transferMode === "push" && announcedBlockSize !== undefined;
    return encodeHandshakePayload({
      compatibilityHash: this.#hash,
      agentMetadataBytes: encodeAgentMetadata(
        isAnnounced ? announcedInBlocksOf(metadata, announcedBlockSize) : metadata,
      ),
      extension: {
        version: 1,
        factors: this.#factors,
        ...(features === undefined ? {} : { features }),
      },
      rest: {},
    });
  }

  /**
   * Asks an engine's ranks for their metadata.
   * @throws The errors of `shakeHands` and `remoteGeometry`.
   */
  async ask(address: EngineAddress, tpRanks: readonly number[]): Promise<RemoteRanks> {
    const { engine, sideChannel, settings, local, log } = this.#options;
    let isRelaxed = false;
    const { ranks, clock, extension, fingerprint } = await shakeHands(address, tpRanks, {
      sideChannel,
      timeoutMs: settings.handshakeTimeoutMs,
      compatibility: {
        hash: this.#hash,
        factors: { ...this.#factors },
        enforced: settings.enforceCompatibility,
        relaxed: ({ how, text, differences }) => {
          isRelaxed = true;
          log.warn("compatibility-relaxed", {
            engineId: address.engineId,
            ownEngineId: engine.engineId,
            setting: "kv_connector_extra_config.enforce_handshake_compat",
            how,
            ignored: text,
            differences,
          });
        },
      },
      portPerRank: settings.perWorkerPorts,
    });
    log.info("handshake-done", {
      engineId: address.engineId,
      ownEngineId: engine.engineId,
      tpRanks,
      compatibility: isRelaxed
        ? "compatibility check relaxed"
        : `compatibility check passed (hash ${this.#hash})`,
    });
    const { incarnation, features, registration_generation: registration } = extension ?? {};
    return {
      ranks: ranks.map(({ ppRank, tpRank, metadata }) => {
        const { tpSize, ppSize } = address;
        const rank = ppSize === 1 ? { tpRank, tpSize } : { tpRank, tpSize, ppRank, ppSize };
        const geometry = remoteGeometry(metadata, rank, local, `model ${engine.model.model}`);
        return { tpRank, geometry, agentMetadata: metadata.agentMetadata };
      }),
      clock,
      incarnation: typeof incarnation === "string" && incarnation !== "" ? incarnation : undefined,
      registrationGeneration: Number.isSafeInteger(registration) ? Number(registration) : undefined,
      fingerprint,
      features: new Set(
        Array.isArray(features) ? features.filter((name) => typeof name === "string") : [],
      ),
    };
  }
}
