import type { AmbientOptions } from "./ambient.js";
import type { LoadFailurePolicy, SchedulerConnector, WorkerConnector } from "./connector.js";
import type { KvCacheConfig } from "./kv-cache.js";
import type { Platform } from "./platform.js";
import type { SideChannel } from "./side-channel.js";
import type { BackendSpec, Transport } from "./transport.js";

export const KV_ROLES = ["kv_producer", "kv_consumer", "kv_both"] as const;
export type KvRole = (typeof KV_ROLES)[number];

/** vLLM's `kv_transfer_config` after validation, in TypeScript case. `@kv/connector` reads it from JSON. */
export interface KvTransferConfig {
  readonly connector: string;
  readonly modulePath?: string | undefined;
  readonly role: KvRole;
  readonly engineId?: string | undefined;
  /** `kv_buffer_device`: where the buffers that are registered live, such as "cpu" or "cuda". */
  readonly bufferDevice?: string | undefined;
  readonly loadFailurePolicy: LoadFailurePolicy;
  readonly enablePermuteLocalKv: boolean;
  readonly sideChannelHost: string;
  readonly sideChannelPort: number;
  /** Empty: the transport's own choice. */
  readonly backends: readonly BackendSpec[];
  /** `kv_connector_extra_config` as given: an open dictionary, each connector reads its own keys. */
  readonly extra: Readonly<Record<string, unknown>>;
  /** Environment variables that the connector may read, already a plain record. */
  readonly env: Readonly<Record<string, string | undefined>>;
}

/** Which engine this is, among its peers. */
export interface EngineIdentity {
  /** Unique for every start of an engine; `kv_transfer_params` and handshakes name it. */
  readonly engineId: string;
  readonly tpSize: number;
  readonly ppSize: number;
  readonly dpRank: number;
  /** What of the model enters the compatibility hash. */
  readonly model: ModelIdentity;
}

/** Factors of vLLM's compatibility hash that only the engine knows (vLLM 0.33, connector version 15). */
export interface ModelIdentity {
  /** The model as it was named to the engine: a path or a hub name, hashed as given. */
  readonly model: string;
  /** The version of vLLM whose peers are to be met; part of the hash. */
  readonly vllmVersion: string;
  readonly connectorVersion: number;
  readonly isHmaEnabled: boolean;
  readonly speculativeConfig: unknown;
  /** The attention backend's name in the hash, where it differs from the one that is announced for the layout. */
  readonly hashedAttentionBackend?: string | undefined;
}

export interface SchedulerOptions extends AmbientOptions {
  readonly config: KvTransferConfig;
  readonly engine: EngineIdentity;
  readonly cache: KvCacheConfig;
  readonly sideChannel: SideChannel;
}

export interface WorkerOptions extends AmbientOptions {
  readonly config: KvTransferConfig;
  readonly engine: EngineIdentity;
  readonly tpRank: number;
  readonly ppRank: number;
  readonly transport: Transport;
  readonly platform: Platform;
  readonly sideChannel: SideChannel;
}

/** What a package that implements a connector exports: by default, or under the connector's name. */
export interface ConnectorModule {
  /** The name under which it is known, as in `kv_connector`. */
  readonly name: string;
  createScheduler(options: SchedulerOptions): Promise<SchedulerConnector> | SchedulerConnector;
  createWorker(options: WorkerOptions): Promise<WorkerConnector> | WorkerConnector;
}
