import type {
  Ambient,
  ConnectorModule,
  KvCacheConfig,
  Log,
  MemoryType,
  Metrics,
  SideChannel,
  Transport,
} from "@kv/interface";
import type { MemoryNetwork } from "@kv/transport-memory";
import type { Sabotage } from "../faults/sabotage.js";
import type { SimRanks } from "./sim-ranks.js";

export interface SimRequest {
  readonly requestId: string;
  readonly prompt: number;
  readonly numTokens: number;
}

export interface SimEngineOptions {
  readonly network: MemoryNetwork;
  readonly hostName: string;
  readonly engineId: string;
  readonly tpSize: number;
  /** Pipeline stages, 1 by default: each has ranks and layers of its own. */
  readonly ppSize?: number;
  readonly numLayers?: number;
  readonly blockSize: number;
  readonly numBlocks: number;
  /** In which the pool gives its blocks out: fragmented, as after hours of use. */
  readonly blockOrder?: readonly number[];
  /** Pull by default. */
  readonly connector?: ConnectorModule;
  readonly numKvHeads?: number;
  readonly skewMs?: number;
  readonly stepMs?: number;
  readonly log?: Log;
  readonly metrics?: Metrics;
  readonly extra?: Readonly<Record<string, unknown>>;
  readonly env?: Readonly<Record<string, string>>;
  /** Part of the compatibility hash. */
  readonly model?: string;
  readonly attentionBackend?: string;
  /** In the hash in place of the engine's own. */
  readonly hashedAttentionBackend?: string;
  /** Where the cache is: "DRAM" by default. */
  readonly memoryType?: MemoryType;
  /** How long a request may wait for its KV, from the step that gives it blocks. */
  readonly receiveDeadlineMs?: number;
  readonly loadFailurePolicy?: "fail" | "recompute";
  /** In place of the memory network's; listens on 127.0.0.1. */
  readonly sideChannel?: SideChannel;
  /** Where a given side channel listens; a free port by default. */
  readonly sideChannelPort?: number;
  /** In place of the memory network's. It is this engine's alone, and closed with it, also when it is killed. */
  readonly transport?: Transport;
  /** Speaks as a vLLM peer does: nothing of ours in its handshakes and parameters, no lease questions answered. */
  readonly plain?: boolean;
  readonly sabotage?: Sabotage;
  /** Computes a prompt's first layer in the step before the last, and says so to its workers. */
  readonly reportsLayers?: boolean;
  /** A rule that is broken from outside, by a connector's own tests. */
  readonly wrapTransport?: (transport: Transport) => Transport;
  /** An accelerator around the connector, whose memory the model computes in; steps wait then until what they computed is saved. */
  readonly device?: (around: SimDeviceAround) => SimDevice | undefined;
  /** Told of what no engine should ever see. */
  violation(what: string): void;
}

export interface SimDeviceAround {
  readonly hostName: string;
  readonly connector: ConnectorModule;
  readonly transport: Transport;
  readonly clock: Ambient["clock"];
  readonly config: KvCacheConfig;
  readonly tpSize: number;
  readonly numBlocks: number;
}

export interface SimDevice {
  readonly connector: ConnectorModule;
  readonly ranks: SimRanks;
}
