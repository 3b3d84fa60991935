import { cpuPlatform, createWorkerOutputAggregator } from "@kv/connector";
import {
  type Ambient,
  ambient,
  type BlockIds,
  type ConnectorModule,
  type ConnectorRequest,
  type EngineIdentity,
  type FailedReceive,
  type KvCacheConfig,
  type KvTransferConfig,
  type Memory,
  type SideChannel,
  type Transport,
  type WorkerConnector,
} from "@kv/interface";
import { pullConnector } from "@kv/pull";
import { announceHash } from "../announce-hash.js";

export interface HeadlessDecodeOptions extends Partial<Ambient> {
  readonly transport: Transport;
  readonly sideChannel: SideChannel;
  readonly config: KvTransferConfig;
  readonly engine: EngineIdentity;
  readonly cache: KvCacheConfig;
  /** Of one rank; every rank has the same. */
  readonly regions: readonly HeadlessRegion[];
  /** How KV comes: pull unless another is given. A connector that is pushed to fits as well. */
  readonly connector?: ConnectorModule;
  /** The compatibility hash that it announces instead of its own: a prefill engine that pushes compares it. */
  readonly announcedHash?: string;
}

export interface HeadlessRegion {
  readonly name: string;
  /** Kernel blocks. */
  readonly numBlocks: number;
  readonly blockLengthBytes: number;
  readonly groupId: number;
}

/** A decode engine without a model: it asks for blocks as an engine would, and shows what landed. */
export interface HeadlessDecode {
  /**
   * Takes a request in, in blocks of the caller's choice, the first of which hold `numComputedTokens` already. Resolves when every rank has
   * its part, with the failure if it has not; nothing touches the blocks then. With all of the prompt here already there is nothing to
   * receive: the peer is told.
   */
  receive(
    request: ConnectorRequest,
    blockIds: BlockIds,
    options?: { readonly numComputedTokens?: number; readonly signal?: AbortSignal },
  ): Promise<{ readonly failure: FailedReceive | undefined; readonly aborted: boolean }>;
  /** The request waits for blocks: its lease is kept alive. `receive` goes on from there. */
  queue(request: ConnectorRequest): void;
  /** The request is queued and then given up before it gets blocks: the peer is told. */
  giveUpQueued(request: ConnectorRequest): void;
  /** The engine is through with a request whose KV has arrived. */
  finish(request: ConnectorRequest, blockIds: BlockIds): void;
  /** Bytes of a kernel block of a region on one rank; a view. */
  block(tpRank: number, region: number, blockId: number): Uint8Array;
  readonly tpSize: number;
  outstanding(): Readonly<Record<string, number>>;
  close(): Promise<void>;
}

/** What memory holds that nothing was written to. */
export const UNTOUCHED = 0xa5;

export async function openHeadlessDecode(options: HeadlessDecodeOptions): Promise<HeadlessDecode> {
  const { transport, sideChannel, config, engine, cache, regions, connector = pullConnector } = options;
  const around = ambient(options);
  const offsets: number[] = [];
  let lengthBytes = 0;
  for (const { numBlocks, blockLengthBytes } of regions) {
    offsets.push(lengthBytes);
    lengthBytes += numBlocks * blockLengthBytes;
  }
  const shared = { config, engine, sideChannel, ...around };
  const memories: Memory[] = [];
  const workers: WorkerConnector[] = [];

  async function openRank(tpRank: number): Promise<void> {
    const memory = transport.allocate(lengthBytes);
    memory.bytes.fill(UNTOUCHED);
    memories.push(memory);
    const worker = await connector.createWorker({
      ...shared,
      tpRank,
      ppRank: 0,
      transport,
      platform: cpuPlatform(),
    });
    workers.push(worker);
    await worker.registerKvCaches({
      config: cache,
      regions: regions.map(({ name, numBlocks, blockLengthBytes, groupId }, index) => ({
        name,
        memory,
        offsetBytes: offsets[index] ?? 0,
        numBlocks,
        blockLengthBytes,
        blockStrideBytes: blockLengthBytes,
        groupId,
        memoryType: memory.memoryType,
      })),
    });
  }

  for (let tpRank = 0; tpRank < engine.tpSize; tpRank++) await openRank(tpRank);
  const scheduler = await connector.createScheduler({ ...shared, cache });
  await scheduler.setHandshakeMetadata(
    await Promise.all(
      workers.map(async (worker) => {
        const metadata = await worker.handshakeMetadata();
        const { announcedHash } = options;
        return announcedHash === undefined ? metadata : announceHash(metadata, announcedHash, { own: true });
      }),
    ),
  );

  const aggregator = createWorkerOutputAggregator({ workers: engine.tpSize });
  const waiting = new Map<string, (failure: FailedReceive | undefined) => void>();

  function step(): void {
    const metadata = scheduler.buildStepMetadata();
    for (const worker of workers) worker.startLoad(metadata);
  }

  for (const [tpRank, worker] of workers.entries()) {
    worker.onProgress(() => {
      const output = aggregator.add({ tpRank }, worker.collectFinished());
      scheduler.applyWorkerOutput(output);
      for (const id of output.finishedReceiving) {
        waiting.get(id)?.(output.failedReceiving.find(({ requestId }) => requestId === id));
        waiting.delete(id);
      }
      step();
    });
  }

  return {
    tpSize: engine.tpSize,
    async receive(request, blockIds, { numComputedTokens = 0, signal } = {}) {
      const { tokens } = scheduler.matchedTokens(request, numComputedTokens);
      if (tokens === 0) {
        scheduler.afterAllocation(request, blockIds, 0);
        step();
        return { failure: undefined, aborted: false };
      }
      const ended = new Promise<FailedReceive | undefined>((resolve) =>
        waiting.set(request.requestId, resolve),
      );
      scheduler.afterAllocation(request, blockIds, tokens);
      step();
      let aborted = false;
      const abort = () => {
        if (!waiting.has(request.requestId)) return;
        aborted = true;
        // The workers have its blocks until they report it.
        const { keepBlocks } = scheduler.requestFinished(request, blockIds, "aborted");
        step();
        if (keepBlocks) return;
        waiting.get(request.requestId)?.(undefined);
        waiting.delete(request.requestId);
      };
      if (signal?.aborted === true) abort();
      else signal?.addEventListener("abort", abort, { once: true });
      const failure = await ended;
      signal?.removeEventListener("abort", abort);
      return { failure, aborted };
    },
    queue(request) {
      scheduler.requestQueued?.(request);
      step();
    },
    giveUpQueued(request) {
      scheduler.requestQueued?.(request);
      scheduler.requestFinished(
        request,
        cache.groups.map(() => []),
        "aborted",
      );
      step();
    },
    finish(request, blockIds) {
      scheduler.requestFinished(request, blockIds, "length");
      step();
    },
    block(tpRank, region, blockId) {
      const { blockLengthBytes = 0 } = regions[region] ?? {};
      const begin = (offsets[region] ?? 0) + blockId * blockLengthBytes;
      return memories[tpRank]?.bytes.subarray(begin, begin + blockLengthBytes) ?? new Uint8Array();
    },
    outstanding() {
      const all: Record<string, number> = { ...scheduler.outstanding() };
      for (const worker of workers) {
        for (const [name, number] of Object.entries(worker.outstanding()))
          all[name] = (all[name] ?? 0) + number;
      }
      return all;
    },
    async close() {
      await scheduler.close();
      for (const worker of workers) await worker.close();
      for (const memory of memories) memory.close();
    },
  };
}
