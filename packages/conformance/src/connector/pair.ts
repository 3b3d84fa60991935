import type {
  BlockIds,
  KvCaches,
  KvTransferParams,
  SchedulerConnector,
  WorkerConnector,
} from "@kv/interface";

/** Options of `connectorSuite`. */
export interface ConnectorSuiteOptions {
  /** Name in the titles of the tests. */
  readonly name: string;
  /** Creates a new prefill and a new decode engine. */
  readonly createPair: () => Promise<ConnectorPair>;
  /** Limit of engine steps for anything that a test waits for. @default 20_000 */
  readonly maxRounds?: number | undefined;
  /**
   * Changes to the `kv_transfer_params` of the prefill side. Each one makes them invalid: `matchedTokens` must throw `KV_REQUEST_INVALID` with the
   * change's first key in the message. @default changes to the parameters of vLLM's NixlConnector
   */
  readonly badParameters?: readonly KvTransferParams[] | undefined;
}

/** Two engines that can reach each other. */
export interface ConnectorPair {
  /** The engine that computes prompts. */
  readonly prefill: ConnectorEnd;
  /** The engine that receives their KV. */
  readonly decode: ConnectorEnd;
  /** Lets time pass between two steps: one turn of the event loop, or some virtual time. */
  progress(): Promise<void>;
  /** Closes transports, side channels and memory. The suite has closed the connectors before. */
  close(): Promise<void>;
  /** Returns the number of timers that are set. None may be left after both connectors are closed. Absent: not tested. */
  pendingTimers?(): number;
  /**
   * Throws unless the first `numTokens` tokens of the prompt are equal in both engines' blocks. Required where the engines differ in TP size, block
   * size or layout. Absent: worker i and region i of both sides must hold the same bytes.
   */
  compare?(prefillBlockIds: BlockIds, decodeBlockIds: BlockIds, numTokens: number): void;
}

/** One engine's new connectors. The suite registers the caches and publishes the handshake metadata. */
export interface ConnectorEnd {
  /** The scheduler side. */
  readonly scheduler: SchedulerConnector;
  /** The worker sides, by rank. */
  readonly workers: readonly WorkerConnector[];
  /** Caches of each worker, in memory that the test can address: at least 64 blocks, groups of kind `full` or `mla`. */
  readonly caches: readonly KvCaches[];
}
