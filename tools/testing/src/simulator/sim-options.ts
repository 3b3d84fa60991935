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
import type { MemoryHost, MemoryNetwork } from "@kv/transport-memory";
import type { Sabotage } from "../faults/sabotage.js";
import type { SimRanks } from "./sim-ranks.js";

export interface SimRequest {
  readonly requestId: string;
  readonly prompt: number;
  readonly numTokens: number;
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
  /** Number of pipeline stages, 1 by default. Each stage has its own ranks and layers. */
  readonly ppSize?: number;
  /** Ranks that share a sequence by decode context parallelism, 1 by default. */
  readonly dcpSize?: number;
  readonly numLayers?: number;
  readonly blockSize: number;
  readonly numBlocks: number;
  /**
   * Order in which the pool first allocates its blocks. A shuffled order gives fragmented blocks,
   * as after hours of use.
   */
  readonly blockOrder?: readonly number[];
  /** Pull by default. */
  readonly connector?: ConnectorModule;
  readonly numKvHeads?: number;
  /**
   * Kind of all layers; "full" by default. "mla" has one KV head, of which every rank has a copy.
   */
  readonly kind?: KvCacheKind | undefined;
  /** Order of heads and tokens in a block; "LBHNC" (HND) by default. */
  readonly layout?: KvCacheConfig["layout"] | undefined;
  /** vLLM's `enable_permute_local_kv`. */
  readonly permutesLocalKv?: boolean | undefined;
  readonly skewMs?: number;
  readonly stepMs?: number;
  readonly log?: Log;
  readonly metrics?: Metrics;
  readonly extra?: Readonly<Record<string, unknown>>;
  readonly env?: Readonly<Record<string, string>>;
  /** Part of the compatibility hash. */
  readonly model?: string;
  /** vLLM's `NIXL_CONNECTOR_VERSION`, also part of the hash. */
  readonly connectorVersion?: number;
  readonly attentionBackend?: string;
  /** Replaces the engine's own attention backend in the compatibility hash. */
  readonly hashedAttentionBackend?: string;
  /** Type of the memory that holds the cache; "DRAM" by default. */
  readonly memoryType?: MemoryType;
  /** Longest time that a request may wait for its KV, from the step that allocates its blocks. */
  readonly receiveDeadlineMs?: number;
  readonly loadFailurePolicy?: "fail" | "recompute";
  /** Replaces the memory network's side channel. It listens on 127.0.0.1. */
  readonly sideChannel?: SideChannel;
  /** Port of the side channel in `sideChannel`; a free port by default. */
  readonly sideChannelPort?: number;
  /**
   * Replaces the memory network's transport. Only this engine uses it. The engine closes it when it
   * is closed or killed.
   */
  readonly transport?: Transport;
  /**
   * Behaves as a vLLM peer: its handshakes and parameters have none of our own fields, and it does
   * not answer lease requests.
   */
  readonly plain?: boolean;
  readonly sabotage?: Sabotage | undefined;
  /**
   * Computes a prompt's first layer in the step before the last, and reports the layer to its
   * workers.
   */
  readonly reportsLayers?: boolean;
  /** Wraps the transport. A connector's own tests use it to break a rule from outside. */
  readonly wrapTransport?: ((transport: Transport) => Transport) | undefined;
  /**
   * Adds an accelerator around the connector. The model computes in its memory, and each step waits
   * until its results are saved.
   */
  readonly device?: (around: SimDeviceAround) => SimDevice | undefined;
  /**
   * The engine hands its connector equal tokens for all prompts. Prompts are then not
   * distinguished.
   */
  readonly handsEqualTokens?: boolean;
  /**
   * Called when a request has received its KV; `isVerified`: the engine may put its blocks into a
   * prefix cache.
   */
  received?(requestId: string, isVerified: boolean): void;
  /** Called when something happens that must never happen in an engine. */
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

/**
 * An engine without a model: the connectors and the blocks are real, the KV is generated. It runs
 * on one host of a memory network and uses that host's clock.
 */
export interface SimEngine {
  readonly engineId: string;
  readonly host: MemoryHost;
  readonly tpSize: number;
  readonly alive: boolean;
  /** Address on which its side channel listens. */
  readonly address: { readonly host: string; readonly port: number };
  /**
   * Computes a prompt, and resolves to the parameters for the engine that reads its KV. `params` of
   * a D: reads the last turn back before.
   */
  prefill(request: SimRequest & { readonly cachedTokens?: number }): Promise<KvTransferParams>;
  /**
   * Receives a prompt's KV, generates its output, and resolves when the request ends, to the
   * parameters for the P of the next turn. A wrong byte is a violation.
   */
  decode(
    request: SimRequest & { params: KvTransferParams; cachedTokens?: number },
  ): Promise<KvTransferParams>;
  abort(requestId: string): void;
  /** Ends what it computes, and takes its caches back from the transport. */
  sleep(): Promise<void>;
  /** Registers its caches again. Their content is gone. */
  wakeUp(): Promise<void>;
  /**
   * Counts of everything that the engine holds, by name, blocks included. All counts are zero when
   * all requests are over.
   */
  outstanding(): Readonly<Record<string, number>>;
  /**
   * Ends the engine as SIGKILL does. Resolves when its resources are released: at once, unless the
   * options gave it a transport or a side channel.
   */
  kill(): Promise<void>;
  close(): Promise<void>;
}
