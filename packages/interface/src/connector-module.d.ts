import type { AmbientOptions } from "./ambient.js";
import type { LoadFailurePolicy, SchedulerConnector, WorkerConnector } from "./connector.js";
import type { KvCacheConfig } from "./kv-cache.js";
import type { Platform } from "./platform.js";
import type { SideChannel } from "./side-channel.js";
import type { BackendSpec, Transport } from "./transport.js";
/** Values of vLLM's `kv_role`: the engine prefills, decodes, or does both. */
export declare const KV_ROLES: readonly ["kv_producer", "kv_consumer", "kv_both"];
/** One of `KV_ROLES`. */
export type KvRole = (typeof KV_ROLES)[number];
/**
 * vLLM's `kv_transfer_config` (0.33) after validation. `readTransferConfig` of `@kv/connector`
 * makes it from JSON.
 */
export interface KvTransferConfig {
    /** Name of the connector (`kv_connector`). */
    readonly connector: string;
    /**
     * Module that exports the connector (`kv_connector_module_path`). Absent: a registered connector.
     */
    readonly modulePath?: string | undefined;
    /** Role of the engine (`kv_role`). */
    readonly role: KvRole;
    /** Id of the engine (`engine_id`). Absent: the engine makes one for each start. */
    readonly engineId?: string | undefined;
    /**
     * Device of the registered buffers, such as "cpu" or "cuda" (`kv_buffer_device`). Absent: the
     * platform's default.
     */
    readonly bufferDevice?: string | undefined;
    /** Policy for requests whose KV did not arrive (`kv_load_failure_policy`). */
    readonly loadFailurePolicy: LoadFailurePolicy;
    /** Whether blocks of another layout are permuted after a transfer (`enable_permute_local_kv`). */
    readonly enablePermuteLocalKv: boolean;
    /** Host of the side channel (`VLLM_NIXL_SIDE_CHANNEL_HOST`). */
    readonly sideChannelHost: string;
    /** Port of the side channel (`VLLM_NIXL_SIDE_CHANNEL_PORT`). */
    readonly sideChannelPort: number;
    /** Backends in order of preference. Empty: the transport's own choice. */
    readonly backends: readonly BackendSpec[];
    /** `kv_connector_extra_config`, unvalidated: each connector reads its own keys. */
    readonly extra: Readonly<Record<string, unknown>>;
    /** Environment variables that the connector may read. */
    readonly env: Readonly<Record<string, string | undefined>>;
}
/** Identity of an engine among its peers. */
export interface EngineIdentity {
    /** Id of the engine, unique for every start. `kv_transfer_params` and handshakes refer to it. */
    readonly engineId: string;
    /** Tensor-parallel ranks. */
    readonly tpSize: number;
    /** Pipeline-parallel ranks. */
    readonly ppSize: number;
    /**
     * Ranks that share a sequence (decode context parallelism, vLLM: `decode_context_parallel_size`):
     * block `i` of the engine's tables holds the blocks `i * dcpSize` to `i * dcpSize + dcpSize - 1`
     * of the sequence, the one with the number `tpRank % dcpSize` on each rank. It divides `tpSize`.
     * Caches of one latent per token only ("mla"). Push between `@kv` peers only, as vLLM 0.33
     * refuses it. @default 1
     */
    readonly dcpSize?: number | undefined;
    /** Data-parallel rank of this engine. */
    readonly dpRank: number;
    /** Facts of the model for the compatibility hash. */
    readonly model: ModelIdentity;
}
/**
 * Factors of vLLM's compatibility hash that only the engine knows (vLLM 0.33, connector version
 * 15).
 */
export interface ModelIdentity {
    /** The model as it was named to the engine, a path or a hub name. It is hashed unchanged. */
    readonly model: string;
    /** Version of vLLM that peers run. */
    readonly vllmVersion: string;
    /** vLLM's `NIXL_CONNECTOR_VERSION` that peers run. */
    readonly connectorVersion: number;
    /** Whether vLLM's hybrid memory allocator is on. */
    readonly isHmaEnabled: boolean;
    /** The speculative decoding configuration, as it enters the hash. */
    readonly speculativeConfig: unknown;
    /**
     * Name of the attention backend in the hash, where it differs from
     * `KvCacheConfig.attentionBackend`.
     */
    readonly hashedAttentionBackend?: string | undefined;
}
/**
 * Options of `ConnectorModule.createScheduler`. The caller owns the side channel and closes it
 * after the connector.
 */
export interface SchedulerOptions extends AmbientOptions {
    /** The validated configuration. */
    readonly config: KvTransferConfig;
    /** Identity of this engine. */
    readonly engine: EngineIdentity;
    /** The engine's KV cache. */
    readonly cache: KvCacheConfig;
    /** Side channel for handshakes of peers. */
    readonly sideChannel: SideChannel;
}
/**
 * Options of `ConnectorModule.createWorker`. The caller owns transport, platform and side channel
 * and closes them after the connector.
 */
export interface WorkerOptions extends AmbientOptions {
    /** The validated configuration. */
    readonly config: KvTransferConfig;
    /** Identity of this engine. */
    readonly engine: EngineIdentity;
    /** Tensor-parallel rank of this worker. */
    readonly tpRank: number;
    /** Pipeline-parallel rank of this worker. */
    readonly ppRank: number;
    /** Transport that moves the KV. */
    readonly transport: Transport;
    /** Platform of the device that holds the KV cache. */
    readonly platform: Platform;
    /** Side channel for handshakes with peers. */
    readonly sideChannel: SideChannel;
}
/**
 * Exports of a package that implements a connector: its default export, or the export with the
 * connector's name.
 */
export interface ConnectorModule {
    /** Name under which the connector is registered, as in `kv_connector`. */
    readonly name: string;
    /**
     * Creates the scheduler side. Errors: `KV_CONFIG_INVALID`, `KV_CONFIG_UNKNOWN_KEY`,
     * `KV_PLATFORM_UNSUPPORTED`, `KV_PLAN_UNSUPPORTED`.
     */
    createScheduler(options: SchedulerOptions): Promise<SchedulerConnector> | SchedulerConnector;
    /**
     * Creates the worker side of one rank. Errors: as `createScheduler`, and those of
     * `Transport.createAgent`.
     */
    createWorker(options: WorkerOptions): Promise<WorkerConnector> | WorkerConnector;
}
