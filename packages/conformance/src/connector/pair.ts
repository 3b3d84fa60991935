import type {
  BlockIds,
  KvCaches,
  KvTransferParams,
  SchedulerConnector,
  WorkerConnector,
} from "@kv/interface";

export interface ConnectorSuiteOptions {
  /** Heads the suite's tests. */
  readonly name: string;
  /** A prefill and a decode engine of their own for each call. */
  readonly createPair: () => Promise<ConnectorPair>;
  /** Rounds of steps within which anything must have come to its end; 20,000 by default. */
  readonly maxRounds?: number;
  /**
   * Changes to the parameters that the prefill side answered, each of which makes them unusable; `matchedTokens` must refuse them with
   * `KV_REQUEST_INVALID` and name the first key. Those of vLLM's NixlConnector by default.
   */
  readonly badParameters?: readonly KvTransferParams[];
}

/** Two engines that can reach each other. */
export interface ConnectorPair {
  readonly prefill: ConnectorEnd;
  readonly decode: ConnectorEnd;
  /** Lets time pass between two steps: a turn of the event loop, or virtual time. */
  progress(): Promise<void>;
  /** Closes what the connectors were handed, after the suite has closed the connectors. */
  close(): Promise<void>;
  /** Timers that are set, where that can be known: none may be left when both connectors are closed. */
  pendingTimers?(): number;
  /**
   * Throws unless the first `numTokens` tokens of the prompt are the same in both engines' blocks. Needed where they differ in
   * TP size, block size or layout; without it worker i and region i of both sides must hold the same bytes.
   */
  compare?(prefillBlockIds: BlockIds, decodeBlockIds: BlockIds, numTokens: number): void;
}

/** One engine's connectors, fresh: the suite registers the caches and publishes the handshake metadata. */
export interface ConnectorEnd {
  readonly scheduler: SchedulerConnector;
  /** By rank. */
  readonly workers: readonly WorkerConnector[];
  /** Of each worker, in memory that the test can address. At least 64 blocks, groups of kind `full` or `mla`. */
  readonly caches: readonly KvCaches[];
}
