import type {
  Ambient,
  ConnectorModule,
  KvCacheConfig,
  KvCacheKind,
  KvTransferParams,
  Log,
  MemoryType,
  Metrics,
  SideChannel,
  Transport,
} from "@kv/interface";
import type { MemoryHost, MemoryNetwork, SeededRandom } from "@kv/transport-memory";
import type { Sabotage } from "../faults/sabotage.js";
import type { SimRanks } from "./sim-ranks.js";

export interface SimRequest {
  readonly requestId: string;
  readonly prompt: number;
  readonly numTokens: number;
  /** Of a local prefix hit. */
  readonly cachedTokens?: number;
  /** Of these, the tokens that each group has; all by default. */
  readonly cachedByGroup?: readonly number[];
  /** Has the tokens of this prompt, and other KV: of another adapter, cache salt or image. */
  readonly sameTokensAs?: number;
  /** Its token of this number is another one. */
  readonly changedToken?: number;
  /** Tokens that D generates, 1 by default. The KV of the last one is never computed. */
  readonly outputTokens?: number;
  readonly params?: KvTransferParams;
}

export interface SimEngineOptions {
  readonly network: MemoryNetwork;
  readonly hostName: string;
  readonly engineId: string;
  readonly tpSize: number;
  /** Each stage has its own ranks and layers. */
  readonly ppSize?: number;
  /** Ranks that share a sequence by decode context parallelism. */
  readonly dcpSize?: number;
  readonly numLayers?: number;
  readonly blockSize: number;
  /** Of each group. */
  readonly numBlocks: number;
  /** Replaces the cache that this and the next options describe: groups of unlike blocks. */
  readonly cache?: KvCacheConfig;
  readonly numKvHeads?: number;
  /** Of all layers. "mla" has one KV head, of which every rank has a copy. */
  readonly kind?: KvCacheKind | undefined;
  /** "LBHNC" (HND) by default. */
  readonly layout?: KvCacheConfig["layout"] | undefined;
  readonly attentionBackend?: string;
  /** A shuffled order gives fragmented blocks. */
  readonly blockOrder?: readonly number[];
  readonly connector?: ConnectorModule;
  readonly permutesLocalKv?: boolean | undefined;
  readonly skewMs?: number;
  readonly stepMs?: number;
  /**
   * Computes prompts in random chunks, leaves them out of steps, and preempts them. The workers
   * hear only of those that take part in a step, as from vLLM's scheduler.
   */
  readonly chunks?: SeededRandom;
  readonly log?: Log;
  readonly metrics?: Metrics;
  readonly extra?: Readonly<Record<string, unknown>>;
  readonly env?: Readonly<Record<string, string>>;
  readonly model?: string;
  /** vLLM's `NIXL_CONNECTOR_VERSION`. */
  readonly connectorVersion?: number;
  /** In the compatibility hash, in place of its own. */
  readonly hashedAttentionBackend?: string;
  /** "DRAM" by default. */
  readonly memoryType?: MemoryType;
  /** Of a request, from the step that allocates its blocks. */
  readonly receiveDeadlineMs?: number;
  readonly loadFailurePolicy?: "fail" | "recompute";
  /** In place of the memory network's. It listens on 127.0.0.1. */
  readonly sideChannel?: SideChannel;
  /** A free port by default. */
  readonly sideChannelPort?: number;
  /** In place of the memory network's. Only this engine uses it, and closes it. */
  readonly transport?: Transport;
  /** As a vLLM peer: without our own fields, and without answers to lease requests. */
  readonly plain?: boolean;
  readonly sabotage?: Sabotage | undefined;
  /** Reports a prompt's first layer in the step before the last. */
  readonly reportsLayers?: boolean;
  readonly wrapTransport?: ((transport: Transport) => Transport) | undefined;
  /** An accelerator around the connector. Each step waits until its results are saved. */
  readonly device?: ((around: SimDeviceAround) => SimDevice | undefined) | undefined;
  /** Prompts are then not distinguished. */
  readonly handsEqualTokens?: boolean;
  /** A request has received its KV. `isVerified`: its blocks may enter a prefix cache. */
  received?(requestId: string, isVerified: boolean): void;
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
  readonly ranks?: SimRanks;
}

/** An engine without a model: the connectors and the blocks are real, the KV is generated. */
export interface SimEngine {
  readonly engineId: string;
  readonly host: MemoryHost;
  readonly tpSize: number;
  readonly alive: boolean;
  readonly address: { readonly host: string; readonly port: number };
  /**
   * Resolves to the parameters for the reader. With `params` of a D, reads the last turn back
   * before.
   */
  prefill(request: SimRequest): Promise<KvTransferParams>;
  /** Resolves to the parameters for the next turn's P, when the output is generated. */
  decode(request: SimRequest & { readonly params: KvTransferParams }): Promise<KvTransferParams>;
  abort(requestId: string): void;
  /** Ends what it computes, and takes its caches back from the transport. */
  sleep(): Promise<void>;
  /** Registers its caches again. Their content is gone. */
  wakeUp(): Promise<void>;
  /** Counts of everything that it holds; all are zero when all requests are over. */
  outstanding(): Readonly<Record<string, number>>;
  /** As SIGKILL does. Resolves when its resources are released. */
  kill(): Promise<void>;
  close(): Promise<void>;
}
