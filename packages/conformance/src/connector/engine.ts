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
  /** Name in the titles of the tests. */
  readonly name: string;
  /** Creates a new prefill and a new decode engine. */
  readonly createPair: () => Promise<ConnectorPair>;
  /** Limit of engine steps for anything that a test waits for. @default 20_000 */
  readonly maxRounds?: number | undefined;
  /**
   * Changes to the `kv_transfer_params` of the prefill side. Each one makes them invalid:
   * `matchedTokens` must throw `KV_REQUEST_INVALID` with the change's first key in the message.
   * @default changes to the parameters of vLLM's NixlConnector
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
  /**
   * Returns the number of timers that are set. None may be left after both connectors are closed.
   * Absent: not tested.
   */
  pendingTimers?(): number;
  /**
   * Throws unless the first `numTokens` tokens of the prompt are equal in both engines' blocks.
   * Required where the engines differ in TP size, block size or layout. Absent: worker i and region
   * i of both sides must hold the same bytes.
   */
  compare?(prefillBlockIds: BlockIds, decodeBlockIds: BlockIds, numTokens: number): void;
}

/**
 * One engine's new connectors. The suite registers the caches and publishes the handshake metadata.
 */
export interface ConnectorEnd {
  /** The scheduler side. */
  readonly scheduler: SchedulerConnector;
  /** The worker sides, by rank. */
  readonly workers: readonly WorkerConnector[];
  /**
   * Caches of each worker, in memory that the test can address: at least 64 blocks, groups of kind
   * `full` or `mla`.
   */
  readonly caches: readonly KvCaches[];
}

/** Content of free blocks. A byte that is written or read too late is then visible. */
const POISON = 0xdd;

export interface RunningRequest {
  readonly request: ConnectorRequest;
  readonly blockIds: BlockIds;
}

/**
 * A minimal engine that makes the calls in the contract's order: it has blocks and steps, and
 * computes nothing.
 */
export interface TestEngine {
  readonly end: ConnectorEnd;
  readonly config: KvCacheConfig;
  /** Outputs so far, merged over all workers. */
  readonly sent: ReadonlySet<string>;
  readonly received: ReadonlySet<string>;
  readonly failed: ReadonlyMap<string, FailedReceive>;
  readonly failedBlockIds: ReadonlySet<number>;
  open(): Promise<void>;
  request(requestId: string, numPromptTokens: number, params?: KvTransferParams): ConnectorRequest;
  takeBlocks(numTokens: number): BlockIds;
  freeBlocks(blockIds: BlockIds): void;
  /**
   * Admits a request: calls `requestQueued`, `matchedTokens` and `afterAllocation`. Returns the
   * tokens that the connector supplies.
   */
  admit(
    request: ConnectorRequest,
    numComputedTokens: number,
  ): RunningRequest & { externalTokens: number };
  /** Ends a request. Its blocks are freed now, or when every worker has reported it. */
  finish(running: RunningRequest, reason: FinishReason): KvTransferParams | undefined;
  /** Requests that have ended and whose blocks are kept. */
  readonly kept: number;
  step(): Promise<void>;
  /** Fills the blocks of all workers with bytes that depend on seed, region and position. */
  compute(blockIds: BlockIds, seed: number): void;
  /** Returns the bytes of a block in one region. */
  block(worker: number, region: number, blockId: number): Uint8Array;
  /** Throws when a byte of a free block was written. */
  expectFreeBlocksUntouched(): void;
  close(): Promise<void>;
}

export function testEngine(end: ConnectorEnd): TestEngine {
  const { scheduler, workers, caches } = end;
  const [first] = caches;
  if (first === undefined || caches.length !== workers.length)
    throw new Error("a pair needs caches for each of its workers");
  const { config } = first;
  const numBlocks = Math.min(
    ...caches.flatMap((cache) => cache.regions.map((region) => region.numBlocks)),
  );
  // All groups share one pool, so that block ids of different groups are never equal and a mix-up
  // is visible.
  const free = Array.from({ length: numBlocks }, (_, id) => id).sort(
    (a, b) => ((a * 37) % numBlocks) - ((b * 37) % numBlocks),
  );
  const kept = new Map<string, BlockIds>();
  const sent = new Set<string>();
  const received = new Set<string>();
  const failed = new Map<string, FailedReceive>();
  const failedBlockIds = new Set<number>();
  const reports = {
    finishedSending: new Map<string, number>(),
    finishedReceiving: new Map<string, number>(),
  };

  function block(worker: number, region: number, blockId: number): Uint8Array {
    const cache = caches[worker]?.regions[region];
    if (cache === undefined) throw new Error(`worker ${worker} has no region ${region}`);
    const at = cache.offsetBytes + blockId * cache.blockStrideBytes;
    return cache.memory.bytes.subarray(at, at + cache.blockLengthBytes);
  }

  function eachBlock(
    ids: Iterable<number>,
    act: (bytes: Uint8Array, worker: number, region: number, id: number) => void,
  ): void {
    const all = [...ids];
    caches.forEach((cache, worker) => {
      cache.regions.forEach((_, region) => {
        for (const id of all) act(block(worker, region, id), worker, region, id);
      });
    });
  }

  /** Returns the ids that every worker has reported with this output. */
  function complete(kind: keyof typeof reports, ids: readonly string[]): string[] {
    return ids.filter((id) => {
      const count = (reports[kind].get(id) ?? 0) + 1;
      if (count < workers.length) {
        reports[kind].set(id, count);
        return false;
      }
      reports[kind].delete(id);
      return true;
    });
  }

  function freeKept(requestId: string): void {
    const blockIds = kept.get(requestId);
    kept.delete(requestId);
    if (blockIds !== undefined) engine.freeBlocks(blockIds);
  }

  const engine: TestEngine = {
    end,
    config,
    sent,
    received,
    failed,
    failedBlockIds,
    get kept() {
      return kept.size;
    },
    async open() {
      eachBlock(free, (bytes) => bytes.fill(POISON));
      for (const [index, worker] of workers.entries())
        await worker.registerKvCaches(caches[index] ?? first);
      await scheduler.setHandshakeMetadata(
        await Promise.all(workers.map((worker) => worker.handshakeMetadata())),
      );
    },
    request: (requestId, numPromptTokens, params) => ({
      requestId,
      numPromptTokens,
      promptTokenIds: Array.from({ length: numPromptTokens }, (_, token) => token),
      kvTransferParams: params,
    }),
    takeBlocks(numTokens) {
      const count = Math.ceil(numTokens / config.blockSize);
      return config.groups.map(() => {
        if (free.length < count)
          throw new Error(`the test needs ${count} blocks, ${free.length} are free`);
        return free.splice(0, count);
      });
    },
    freeBlocks(blockIds) {
      const ids = blockIds.flat();
      eachBlock(ids, (bytes) => bytes.fill(POISON));
      free.push(...ids);
    },
    admit(request, numComputedTokens) {
      scheduler.requestQueued?.(request);
      const { tokens: externalTokens } = scheduler.matchedTokens(request, numComputedTokens);
      const blockIds = engine.takeBlocks(request.numPromptTokens);
      scheduler.afterAllocation(request, blockIds, externalTokens);
      return { request, blockIds, externalTokens };
    },
    finish({ request, blockIds }, reason) {
      const { keepBlocks, kvTransferParams } = scheduler.requestFinished(request, blockIds, reason);
      if (keepBlocks) kept.set(request.requestId, blockIds);
      else engine.freeBlocks(blockIds);
      return kvTransferParams === undefined ? undefined : plain(kvTransferParams);
    },
    async step() {
      const metadata = plain(scheduler.buildStepMetadata());
      for (const worker of workers) worker.startLoad(plain(metadata));
      await Promise.all(workers.map((worker) => worker.waitForSave(plain(metadata))));
      const merged: WorkerOutput[] = [];
      for (const worker of workers) {
        const output = plain(worker.collectFinished());
        for (const failure of output.failedReceiving) failed.set(failure.requestId, failure);
        for (const id of output.failedBlockIds) failedBlockIds.add(id);
        merged.push({
          ...output,
          finishedSending: complete("finishedSending", output.finishedSending),
          finishedReceiving: complete("finishedReceiving", output.finishedReceiving),
        });
      }
      for (const output of merged) {
        // The connector is responsible for the blocks until it has the output, so they are freed
        // afterwards.
        scheduler.applyWorkerOutput(output);
        for (const id of output.finishedSending) {
          expect(sent.has(id), `${id} is reported as sent once`).toBe(false);
          sent.add(id);
          freeKept(id);
        }
        for (const id of output.finishedReceiving) {
          expect(received.has(id), `${id} is reported as received once`).toBe(false);
          received.add(id);
          freeKept(id);
        }
      }
    },
    compute(blockIds, seed) {
      eachBlock(blockIds.flat(), (bytes, worker, region, id) => {
        const order = blockIds.flat().indexOf(id);
        for (let at = 0; at < bytes.length; at++) {
          bytes[at] =
            (seed * 53 + worker * 19 + region * 11 + order * 7 + at * 3 + (at >>> 8) * 5) & 0xff;
        }
      });
    },
    block,
    expectFreeBlocksUntouched() {
      eachBlock(free, (bytes, worker, region, id) => {
        const touched = bytes.findIndex((byte) => byte !== POISON);
        if (touched >= 0)
          expect.fail(
            `byte ${touched} of free block ${id}, worker ${worker}, region ${region} was written`,
          );
      });
    },
    async close() {
      await Promise.all(workers.map((worker) => worker.close()));
      await scheduler.close();
    },
  };
  return engine;
}

/** Passes a value through JSON, as to another process, and checks that nothing is lost. */
function plain<T extends StepMetadata | WorkerOutput | KvTransferParams>(value: T): T {
  const copy = JSON.parse(JSON.stringify(value)) as T;
  expect(copy).toStrictEqual(value);
  return copy;
}
