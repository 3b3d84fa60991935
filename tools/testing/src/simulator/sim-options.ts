import type { EngineRanks } from "@kv/conformance/engine/ranks";
import type { EngineRequest, StepsOptions } from "@kv/conformance/engine/steps";
import type {
  Clock,
  ConnectorModule,
  KvCacheConfig,
  KvCacheKind,
  Log,
  MemoryType,
  Metrics,
  SideChannel,
  Transport,
} from "@kv/interface";
import type { MemoryNetwork } from "@kv/transport-memory";
import type { Sabotage } from "../faults/sabotage.js";

export type { EngineRequest };

export interface SimEngineOptions extends StepsOptions {
  readonly network: MemoryNetwork;
  readonly ppSize?: number;
  readonly numLayers?: number;
  readonly blockSize: number;
  /** In place of the options below: groups of unlike blocks. */
  readonly cache?: KvCacheConfig;
  readonly numKvHeads?: number;
  /** "mla" has one KV head, of which every rank has a copy. */
  readonly kind?: KvCacheKind | undefined;
  readonly layout?: KvCacheConfig["layout"] | undefined;
  readonly attentionBackend?: string;
  readonly connector?: ConnectorModule | undefined;
  readonly permutesLocalKv?: boolean | undefined;
  readonly skewMs?: number;
  readonly log?: Log;
  readonly metrics?: Metrics;
  readonly extra?: Readonly<Record<string, unknown>>;
  readonly env?: Readonly<Record<string, string>>;
  readonly model?: string;
  readonly connectorVersion?: number;
  /** In the compatibility hash, in place of its own. */
  readonly hashedAttentionBackend?: string;
  readonly memoryType?: MemoryType;
  readonly loadFailurePolicy?: "fail" | "recompute";
  /** It listens on 127.0.0.1. */
  readonly sideChannel?: SideChannel;
  readonly sideChannelPort?: number;
  /** Only this engine uses it, and closes it. */
  readonly transport?: Transport;
  readonly sabotage?: Sabotage | undefined;
  readonly wrapTransport?: ((transport: Transport) => Transport) | undefined;
  /** Around the connector. Each step waits until its results are saved. */
  readonly device?: ((around: SimDeviceAround) => SimDevice | undefined) | undefined;
}

export interface SimDeviceAround {
  readonly hostName: string;
  readonly connector: ConnectorModule;
  readonly transport: Transport;
  readonly clock: Clock;
  readonly config: KvCacheConfig;
  readonly tpSize: number;
  readonly numBlocks: number;
}

export interface SimDevice {
  readonly connector: ConnectorModule;
  readonly ranks?: EngineRanks;
}

export function simConfig(
  blockSize: number,
  numKvHeads = 4,
  numLayers = 2,
  kind: KvCacheKind = "full",
): KvCacheConfig {
  const layerNames = Array.from({ length: numLayers }, (_, layer) => `layers.${layer}`);
  return {
    groups: [{ kind, layerNames }],
    blockSize,
    physicalBlocksPerLogical: 1,
    numKvHeads,
    headSize: 2,
    numHiddenLayers: numLayers,
    dtype: "torch.float32",
    cacheDtype: "auto",
    layout: "LBHNC",
    attentionBackend: "SIM",
  };
}
