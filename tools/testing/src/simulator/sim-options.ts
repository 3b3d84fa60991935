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
  /** Number that identifies the prompt. */
  readonly prompt: number;
  readonly numTokens: number;
  /** Tokens of a local prefix hit; none by default. */
  readonly cachedTokens?: number;
  /** Of these, the tokens that each group has; all by default. */
  readonly cachedByGroup?: readonly number[];
  /** Has the tokens of this prompt, and other KV: of another adapter, cache salt or image. */
  readonly sameTokensAs?: number;
  /** Its token of this number is another one. */
  readonly changedToken?: number;
  /** Tokens that D generates, 1 by default. The KV of the last one is never computed. */
  readonly outputTokens?: number;
  /** Parameters besides those of the leg. */
  readonly params?: KvTransferParams;
}

export interface SimEngineOptions {
  readonly network: MemoryNetwork;
  readonly hostName: string;
  readonly engineId: string;
  readonly tpSize: number;
  /** Pipeline stages, 1 by default. Each stage has its own ranks and layers. */
  readonly ppSize?: number;
  /** Ranks that share a sequence by decode context parallelism, 1 by default. */
  readonly dcpSize?: number;
  readonly numLayers?: number;
  readonly blockSize: number;
  /** Of each group. */
  readonly numBlocks: number;
  /** Replaces the cache that this and the next options describe: groups of unlike blocks. */
  readonly cache?: KvCacheConfig;
  readonly numKvHeads?: number;
  /** Of all layers; "full" by default. "mla" has one KV head, of which every rank has a copy. */
  readonly kind?: KvCacheKind | undefined;
  /** Order of heads and tokens in a block; "LBHNC" (HND) by default. */
  readonly layout?: KvCacheConfig["layout"] | undefined;
  readonly attentionBackend?: string;
  /** Order in which the pool first allocates its blocks: a shuffled one gives fragmented blocks. */
  readonly blockOrder?: readonly number[];
  /** Pull by default. */
  readonly connector?: ConnectorModule;
  /** vLLM's `enable_permute_local_kv`. */
  readonly permutesLocalKv?: boolean | undefined;
  readonly skewMs?: number;
  readonly stepMs?: number;
  /**
   * Computes prompts in random chunks, leaves them out of steps, and preempts them. The steps name
   * only the requests that take part to the workers, as vLLM's scheduler does.
   */
  readonly chunks?: SeededRandom;
  readonly log?: Log;
  readonly metrics?: Metrics;
  /** `kv_connector_extra_config`. */
  readonly extra?: Readonly<Record<string, unknown>>;
  readonly env?: Readonly<Record<string, string>>;
  /** Part of the compatibility hash. */
  readonly model?: string;
  /** vLLM's `NIXL_CONNECTOR_VERSION`, also part of the hash. */
  readonly connectorVersion?: number;
  /** Replaces the engine's own attention backend in the compatibility hash. */
  readonly hashedAttentionBackend?: string;
  /** Of the memory that holds the cache; "DRAM" by default. */
  readonly memoryType?: MemoryType;
  /** Longest time that a request may wait for its KV, from the step that allocates its blocks. */
  readonly receiveDeadlineMs?: number;
  readonly loadFailurePolicy?: "fail" | "recompute";
  /** Replaces the memory network's side channel. It listens on 127.0.0.1. */
  readonly sideChannel?: SideChannel;
  /** Port of `sideChannel`; a free port by default. */
  readonly sideChannelPort?: number;
  /** Replaces the memory network's transport. Only this engine uses it, and closes it. */
  readonly transport?: Transport;
  /**
   * Behaves as a vLLM peer: its handshakes and parameters have none of our own fields, and it does
   * not answer lease requests.
   */
  readonly plain?: boolean;
  readonly sabotage?: Sabotage | undefined;
  /** Computes a prompt's first layer in the step before the last, and reports it to its workers. */
  readonly reportsLayers?: boolean;
  /** A connector's own tests use it to break a rule from outside. */
  readonly wrapTransport?: ((transport: Transport) => Transport) | undefined;
  /**
   * Adds an accelerator around the connector. The model computes in its memory, and each step waits
   * until its results are saved.
   */
  readonly device?: ((around: SimDeviceAround) => SimDevice | undefined) | undefined;
  /** Hands its connector equal tokens for all prompts, which are then not distinguished. */
  readonly handsEqualTokens?: boolean;
  /** A request has received its KV. `isVerified`: its blocks may enter a prefix cache. */
  received?(requestId: string, isVerified: boolean): void;
  /** Something happened that must never happen in an engine. */
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
  /** Default: the engine's own. */
  readonly ranks?: SimRanks;
}

/**
 * An engine without a model: the connectors and the blocks are real, the KV is generated. It runs
 * on one host of a memory network and uses that host's clock.
 */
export interface SimEngine {
  readonly engineId: string;
  readonly host: MemoryHost;
  readonly tpSize: number;
  readonly alive: boolean;
  /** Where its side channel listens. */
  readonly address: { readonly host: string; readonly port: number };
  /**
   * Computes a prompt, and resolves to the parameters for the engine that reads its KV. `params` of
   * a D: reads the last turn back before.
   */
  prefill(request: SimRequest): Promise<KvTransferParams>;
  /**
   * Receives a prompt's KV, generates its output, and resolves when the request ends, to the
   * parameters for the P of the next turn. A wrong byte is a violation.
   */
  decode(request: SimRequest & { readonly params: KvTransferParams }): Promise<KvTransferParams>;
  abort(requestId: string): void;
  /** Ends what it computes, and takes its caches back from the transport. */
  sleep(): Promise<void>;
  /** Registers its caches again. Their content is gone. */
  wakeUp(): Promise<void>;
  /** Counts of everything that it holds; all are zero when all requests are over. */
  outstanding(): Readonly<Record<string, number>>;
  /** Ends the engine as SIGKILL does. Resolves when its resources are released. */
  kill(): Promise<void>;
  close(): Promise<void>;
}
