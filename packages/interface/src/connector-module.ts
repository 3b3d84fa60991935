import type { AmbientOptions } from "./ambient.js";
import type { LoadFailurePolicy, SchedulerConnector, WorkerConnector } from "./connector.js";
import type { KvCacheConfig } from "./kv-cache.js";
import type { Platform } from "./platform.js";
import type { SideChannel } from "./side-channel.js";
import type { BackendSpec, Transport } from "./transport.js";

/** Values of vLLM's `kv_role`: the engine prefills, decodes or does both. */
export const KV_ROLES = ["kv_producer", "kv_consumer", "kv_both"] as const;
/** One of `KV_ROLES`. */
export type KvRole = (typeof KV_ROLES)[number];

/**
 * vLLM's `kv_transfer_config` (0.33) after validation by `readTransferConfig` of `@kv/connector`.
 */
export interface KvTransferConfig {
  readonly connector: string;
  /** `kv_connector_module_path`. Absent: a registered connector. */
  readonly modulePath?: string | undefined;
  readonly role: KvRole;
  /** Absent: the engine makes an id at each start. */
  readonly engineId?: string | undefined;
  /** `kv_buffer_device`, such as "cpu" or "cuda". Absent: the platform's default. */
  readonly bufferDevice?: string | undefined;
  readonly loadFailurePolicy: LoadFailurePolicy;
  /** `enable_permute_local_kv`: blocks of another layout are permuted after a transfer. */
  readonly enablePermuteLocalKv: boolean;
  readonly sideChannelHost: string;
  readonly sideChannelPort: number;
  /** In order of preference. Empty: the transport chooses. */
  readonly backends: readonly BackendSpec[];
  /** `kv_connector_extra_config`, unvalidated: each connector reads its own keys. */
  readonly extra: Readonly<Record<string, unknown>>;
  readonly env: Readonly<Record<string, string | undefined>>;
}

/** Identity of an engine among its peers. */
export interface EngineIdentity {
  /** Unique for every start. `kv_transfer_params` and handshakes refer to it. */
  readonly engineId: string;
  readonly tpSize: number;
  readonly ppSize: number;
  /**
   * Ranks that share a sequence (vLLM: `decode_context_parallel_size`); it divides `tpSize`. Each
   * block of the engine's tables stands for `dcpSize` consecutive blocks of the sequence; a rank
   * has the one at `tpRank % dcpSize`. Only for "mla" caches, and for push between `@kv` peers:
   * vLLM 0.33 refuses it. @default 1
   */
  readonly dcpSize?: number | undefined;
  readonly dpRank: number;
  readonly model: ModelIdentity;
}

/**
 * Factors of vLLM's compatibility hash that only the engine knows (vLLM 0.33, connector version
 * 15).
 */
export interface ModelIdentity {
  /** Path or hub name as the engine got it; it is hashed unchanged. */
  readonly model: string;
  readonly vllmVersion: string;
  /** vLLM's `NIXL_CONNECTOR_VERSION` at the peers. */
  readonly connectorVersion: number;
  readonly isHmaEnabled: boolean;
  /** The form that enters the hash. */
  readonly speculativeConfig: unknown;
  /** The hash's value, where it differs from `KvCacheConfig.attentionBackend`. */
  readonly hashedAttentionBackend?: string | undefined;
}

/**
 * Options of `ConnectorModule.createScheduler`. The caller closes `sideChannel` after the
 * connector.
 */
export interface SchedulerOptions extends AmbientOptions {
  readonly config: KvTransferConfig;
  readonly engine: EngineIdentity;
  readonly cache: KvCacheConfig;
  readonly sideChannel: SideChannel;
}

/**
 * Options of `ConnectorModule.createWorker`. The caller closes transport, platform and side channel
 * after the connector.
 */
export interface WorkerOptions extends AmbientOptions {
  readonly config: KvTransferConfig;
  readonly engine: EngineIdentity;
  readonly tpRank: number;
  readonly ppRank: number;
  readonly transport: Transport;
  readonly platform: Platform;
  readonly sideChannel: SideChannel;
}

/** What a connector's package exports, as its default or by the connector's name. */
export interface ConnectorModule {
  readonly name: string;
  /**
   * Creates the scheduler side.
   *
   * @throws `KV_CONFIG_INVALID`, `KV_CONFIG_UNKNOWN_KEY`, `KV_PLATFORM_UNSUPPORTED`,
   * `KV_PLAN_UNSUPPORTED`.
   */
  createScheduler(options: SchedulerOptions): Promise<SchedulerConnector> | SchedulerConnector;
  /**
   * Creates the worker side of one rank.
   *
   * @throws as `createScheduler` and `Transport.createAgent`.
   */
  createWorker(options: WorkerOptions): Promise<WorkerConnector> | WorkerConnector;
}
