import type {
  BlockIds,
  ConnectorRequest,
  FailedReceive,
  FinishReason,
  KvCacheConfig,
  KvCaches,
  KvTransferParams,
  SchedulerConnector,
  StepMetadata,
  WorkerConnector,
  WorkerOutput,
} from "@kv/interface";
import { expect } from "vitest";

/** Options of `connectorSuite`. */
export interface ConnectorSuiteOptions {
  readonly name: string;
  /** New prefill and decode engines. */
  readonly createPair: () => Promise<ConnectorPair>;
  /** Most engine steps that a test waits. @default 20_000 */
  readonly maxRounds?: number | undefined;
  /**
   * Changes that each make the prefill side's `kv_transfer_params` invalid: `matchedTokens` must
   * throw `KV_REQUEST_INVALID` with the change's first key.
   * @default changes to the parameters of vLLM's NixlConnector
   */
  readonly badParameters?: readonly KvTransferParams[] | undefined;
}

/** Two engines that can reach each other. */
export interface ConnectorPair {
  /** Computes prompts. */
  readonly prefill: ConnectorEnd;
  /** Receives their KV. */
  readonly decode: ConnectorEnd;
  /** Lets time pass between steps: a turn of the event loop, or virtual time. */
  progress(): Promise<void>;
  /** Closes transports, side channels and memory, after the connectors. */
  close(): Promise<void>;
  /**
   * Number of set timers; none may be left after both connectors are closed. Absent: not tested.
   */
  pendingTimers?(): number;
  /**
   * Throws unless both engines' blocks have equal KV for `numTokens` tokens. Required where TP
   * size, block size or layout differ. Absent: worker i and region i must be equal.
   */
  compare?(prefillBlockIds: BlockIds, decodeBlockIds: BlockIds, numTokens: number): void;
}

/** One engine's new connectors. The suite registers caches and publishes handshake metadata. */
export interface ConnectorEnd {
  readonly scheduler: SchedulerConnector;
  readonly workers: readonly WorkerConnector[];
  /**
   * Caches of each worker, in addressable memory: at least 64 blocks, groups of kind `full` or
   * `mla`.
   */
  readonly caches: readonly KvCaches[];
}

/** Fills free blocks, to reveal a byte that is written or read too late. */
const POISON = 0xdd;

export interface RunningRequest {
  readonly request: ConnectorRequest;
  readonly blockIds: BlockIds;
}

/** A minimal engine with blocks and steps, which makes calls in the contract's order. */
export class TestEngine {
  readonly end: ConnectorEnd;
  readonly config: KvCacheConfig;
  /** Merged over all workers. */
  readonly sent = new Set<string>();
  readonly received = new Set<string>();
  readonly failed = new Map<string, FailedReceive>();
  readonly failedBlockIds = new Set<number>();
  readonly #free: number[];
  readonly #kept = new Map<string, BlockIds>();
  /** How many workers have reported each request. */
  readonly #reports = new Map<string, number>();

  constructor(end: ConnectorEnd) {
    const { workers, caches } = end;
    const [first] = caches;
    if (first === undefined || caches.length !== workers.length)
      throw new Error("a pair needs caches for each of its workers");
    this.end = end;
    this.config = first.config;
    const numBlocks = Math.min(
      ...caches.flatMap((cache) => cache.regions.map((region) => region.numBlocks)),
    );
    // A common pool gives groups unequal ids, so that a mix-up is visible.
    this.#free = Array.from({ length: numBlocks }, (_, id) => id).sort(
      (a, b) => ((a * 37) % numBlocks) - ((b * 37) % numBlocks),
    );
  }

  /** Ended requests whose blocks are kept. */
  get kept(): number {
    return this.#kept.size;
  }

  async open(): Promise<void> {
    const { scheduler, workers, caches } = this.end;
    this.#eachBlock(this.#free, (bytes) => bytes.fill(POISON));
    for (const [index, worker] of workers.entries())
      await worker.registerKvCaches(caches[index] as KvCaches);
    await scheduler.setHandshakeMetadata(
      await Promise.all(workers.map((worker) => worker.handshakeMetadata())),
    );
  }

  request(
    requestId: string,
    numPromptTokens: number,
    kvTransferParams?: KvTransferParams,
  ): ConnectorRequest {
    const promptTokenIds = Array.from({ length: numPromptTokens }, (_, token) => token);
    return { requestId, numPromptTokens, promptTokenIds, kvTransferParams };
  }

  takeBlocks(numTokens: number): BlockIds {
    const count = Math.ceil(numTokens / this.config.blockSize);
    return this.config.groups.map(() => {
      if (this.#free.length < count)
        throw new Error(`the test needs ${count} blocks, ${this.#free.length} are free`);
      return this.#free.splice(0, count);
    });
  }

  /**
   * Calls `requestQueued`, `matchedTokens` and `afterAllocation`. Returns the tokens that the
   * connector supplies.
   */
  admit(
    request: ConnectorRequest,
    numComputedTokens: number,
  ): RunningRequest & { externalTokens: number } {
    const { scheduler } = this.end;
    scheduler.requestQueued?.(request);
    const { tokens: externalTokens } = scheduler.matchedTokens(request, numComputedTokens);
    const blockIds = this.takeBlocks(request.numPromptTokens);
    scheduler.afterAllocation(request, blockIds, externalTokens);
    return { request, blockIds, externalTokens };
  }

  /** Frees the blocks now, or when every worker has reported the request. */
  finish(
    { request, blockIds }: RunningRequest,
    reason: FinishReason,
  ): KvTransferParams | undefined {
    const { scheduler } = this.end;
    const { keepBlocks, kvTransferParams } = scheduler.requestFinished(request, blockIds, reason);
    if (keepBlocks) this.#kept.set(request.requestId, blockIds);
    else this.#freeBlocks(blockIds);
    return kvTransferParams === undefined ? undefined : plain(kvTransferParams);
  }

  async step(): Promise<void> {
    const { scheduler, workers } = this.end;
    const metadata = plain(scheduler.buildStepMetadata());
    for (const worker of workers) worker.startLoad(plain(metadata));
    await Promise.all(workers.map((worker) => worker.waitForSave(plain(metadata))));
    for (const worker of workers) {
      const output = plain(worker.collectFinished());
      for (const failure of output.failedReceiving) this.failed.set(failure.requestId, failure);
      for (const id of output.failedBlockIds) this.failedBlockIds.add(id);
      const finishedSending = this.#complete("sent", output.finishedSending);
      const finishedReceiving = this.#complete("received", output.finishedReceiving);
      // Until it has the output, the connector is responsible for the blocks.
      scheduler.applyWorkerOutput({ ...output, finishedSending, finishedReceiving });
      this.#reported("sent", finishedSending);
      this.#reported("received", finishedReceiving);
    }
  }

  /** Bytes depend on seed, region and position. */
  compute(blockIds: BlockIds, seed: number): void {
    const ids = blockIds.flat();
    this.#eachBlock(ids, (bytes, worker, region, id) => {
      const first = seed * 53 + worker * 19 + region * 11 + ids.indexOf(id) * 7;
      for (let at = 0; at < bytes.length; at++)
        bytes[at] = (first + at * 3 + (at >>> 8) * 5) & 0xff;
    });
  }

  block(worker: number, region: number, blockId: number): Uint8Array {
    const cache = this.end.caches[worker]?.regions[region];
    if (cache === undefined) throw new Error(`worker ${worker} has no region ${region}`);
    const at = cache.offsetBytes + blockId * cache.blockStrideBytes;
    return cache.memory.bytes.subarray(at, at + cache.blockLengthBytes);
  }

  expectFreeBlocksUntouched(): void {
    this.#eachBlock(this.#free, (bytes, worker, region, id) => {
      const touched = bytes.findIndex((byte) => byte !== POISON);
      if (touched >= 0)
        expect.fail(
          `byte ${touched} of free block ${id}, worker ${worker}, region ${region} was written`,
        );
    });
  }

  async close(): Promise<void> {
    await Promise.all(this.end.workers.map((worker) => worker.close()));
    await this.end.scheduler.close();
  }

  #eachBlock(
    ids: readonly number[],
    act: (bytes: Uint8Array, worker: number, region: number, id: number) => void,
  ): void {
    for (const [worker, { regions }] of this.end.caches.entries())
      for (const region of regions.keys())
        for (const id of ids) act(this.block(worker, region, id), worker, region, id);
  }

  #freeBlocks(blockIds: BlockIds): void {
    const ids = blockIds.flat();
    this.#eachBlock(ids, (bytes) => bytes.fill(POISON));
    this.#free.push(...ids);
  }

  /** Ids that every worker has now reported. */
  #complete(kind: "sent" | "received", ids: readonly string[]): string[] {
    return ids.filter((id) => {
      const key = `${kind} ${id}`;
      const count = (this.#reports.get(key) ?? 0) + 1;
      if (count < this.end.workers.length) this.#reports.set(key, count);
      else this.#reports.delete(key);
      return count >= this.end.workers.length;
    });
  }

  #reported(kind: "sent" | "received", ids: readonly string[]): void {
    for (const id of ids) {
      expect(this[kind].has(id), `${id} is reported as ${kind} once`).toBe(false);
      this[kind].add(id);
      const blockIds = this.#kept.get(id);
      this.#kept.delete(id);
      if (blockIds !== undefined) this.#freeBlocks(blockIds);
    }
  }
}

/** JSON, as to another process, must lose nothing. */
function plain<T extends StepMetadata | WorkerOutput | KvTransferParams>(value: T): T {
  const copy = JSON.parse(JSON.stringify(value)) as T;
  expect(copy).toStrictEqual(value);
  return copy;
}
