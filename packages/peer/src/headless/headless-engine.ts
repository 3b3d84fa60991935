import { cpuPlatform, createWorkerOutputAggregator } from "@kv/connector";
import {
  type Ambient,
  type AmbientOptions,
  ambient,
  type ConnectorModule,
  type EngineIdentity,
  type KvCacheConfig,
  type KvTransferConfig,
  type Memory,
  type SchedulerConnector,
  type SideChannel,
  type Transport,
  type WorkerConnector,
  type WorkerOutput,
} from "@kv/interface";
import { replaceCompatibilityHash } from "../protocol/handshake.js";

/** One region of a headless engine's KV cache; every rank has the same regions. */
export interface HeadlessRegion {
  /** The layer's name, equal on both sides of a pair. */
  readonly name: string;
  /** Kernel blocks in the region. */
  readonly numBlocks: number;
  /** Bytes of one kernel block on one rank. Blocks follow each other without a gap. */
  readonly blockLengthBytes: number;
  /** Index into `cache.groups`; -1 for a region that all groups share. */
  readonly groupId: number;
}

/** How a headless engine reaches its peer. */
export interface Reach extends AmbientOptions {
  /** Allocates the cache and moves the blocks. The caller closes it. */
  readonly transport: Transport;
  /** Carries the handshakes. The caller closes it. */
  readonly sideChannel: SideChannel;
  /** Where the peer reaches this side for a handshake. @default "127.0.0.1" */
  readonly sideChannelHost?: string | undefined;
  /** The port there; 0 takes a free one. @default 0 */
  readonly sideChannelPort?: number | undefined;
}

/** What a headless engine consists of, on either side of a pair. */
export interface HeadlessEngineOptions extends Omit<Reach, "sideChannelHost" | "sideChannelPort"> {
  /** vLLM's `kv_transfer_config`, as `readTransferConfig` of `@kv/connector` returns it. */
  readonly config: KvTransferConfig;
  /** Engine id, parallel sizes and the model facts that enter the compatibility hash. */
  readonly engine: EngineIdentity;
  readonly cache: KvCacheConfig;
  readonly regions: readonly HeadlessRegion[];
}

interface Settings extends HeadlessEngineOptions {
  readonly connector: ConnectorModule;
  /** Announced in place of the hash that the engine computes itself. */
  readonly announcedHash: string | undefined;
  /** Announce what only engines of this project understand, next to `announcedHash`. */
  readonly keepExtension: boolean;
  readonly fill: number;
  /** Called with the merged output of all ranks, after the scheduler has applied it. */
  readonly onOutput: (output: WorkerOutput) => void;
}

/**
 * The part that a headless decode and a headless prefill engine share: memory and a worker
 * connector per rank, one scheduler connector, and engine steps without a model.
 */
export class HeadlessEngine {
  readonly #settings: Settings;
  readonly #ambient: Ambient;
  readonly #memories: Memory[] = [];
  readonly #workers: WorkerConnector[] = [];
  readonly #offsets: number[] = [];
  #scheduler: SchedulerConnector | undefined;

  private constructor(settings: Settings) {
    this.#settings = settings;
    this.#ambient = ambient(settings);
  }

  static async open(settings: Settings): Promise<HeadlessEngine> {
    const engine = new HeadlessEngine(settings);
    try {
      await engine.#open();
      return engine;
    } catch (error) {
      await engine.close();
      throw error;
    }
  }

  get scheduler(): SchedulerConnector {
    if (this.#scheduler === undefined) throw new Error("the headless engine is not open");
    return this.#scheduler;
  }

  get tpSize(): number {
    return this.#settings.engine.tpSize;
  }

  async #open(): Promise<void> {
    const { config, engine, sideChannel, regions, cache, connector } = this.#settings;
    let lengthBytes = 0;
    for (const { numBlocks, blockLengthBytes } of regions) {
      this.#offsets.push(lengthBytes);
      lengthBytes += numBlocks * blockLengthBytes;
    }
    const shared = { config, engine, sideChannel, ...this.#ambient };
    for (let tpRank = 0; tpRank < engine.tpSize; tpRank++)
      await this.#openRank(tpRank, lengthBytes, shared);
    const scheduler = await connector.createScheduler({ ...shared, cache });
    this.#scheduler = scheduler;
    await scheduler.setHandshakeMetadata(
      await Promise.all(this.#workers.map((worker) => this.#handshakeMetadata(worker))),
    );
    const aggregator = createWorkerOutputAggregator({ workers: engine.tpSize });
    for (const [tpRank, worker] of this.#workers.entries()) {
      worker.onProgress(() => {
        const output = aggregator.add({ tpRank }, worker.collectFinished());
        scheduler.applyWorkerOutput(output);
        this.#settings.onOutput(output);
        this.step();
      });
    }
  }

  async #openRank(
    tpRank: number,
    lengthBytes: number,
    shared: Ambient & Pick<Settings, "config" | "engine" | "sideChannel">,
  ): Promise<void> {
    const { transport, connector, cache, regions, fill } = this.#settings;
    const memory = transport.allocate(lengthBytes);
    this.#memories.push(memory);
    if (fill !== 0) fillMemory(memory, fill);
    const worker = await connector.createWorker({
      ...shared,
      tpRank,
      ppRank: 0,
      transport,
      platform: cpuPlatform(),
    });
    this.#workers.push(worker);
    await worker.registerKvCaches({
      config: cache,
      regions: regions.map(({ name, numBlocks, blockLengthBytes, groupId }, index) => ({
        name,
        memory,
        offsetBytes: this.#offsets[index] ?? 0,
        numBlocks,
        blockLengthBytes,
        blockStrideBytes: blockLengthBytes,
        groupId,
        memoryType: memory.memoryType,
      })),
    });
  }

  async #handshakeMetadata(worker: WorkerConnector) {
    const { announcedHash, keepExtension } = this.#settings;
    const metadata = await worker.handshakeMetadata();
    if (announcedHash === undefined) return metadata;
    return replaceCompatibilityHash(metadata, announcedHash, { keepExtension });
  }

  /** Runs one engine step: the workers start what the scheduler connector asks for. */
  step(): void {
    const metadata = this.scheduler.buildStepMetadata();
    for (const worker of this.#workers) worker.startLoad(metadata);
  }

  /** A view of one kernel block; empty for a rank that does not exist. */
  block(tpRank: number, region: number, blockId: number): Uint8Array {
    const { blockLengthBytes = 0 } = this.#settings.regions[region] ?? {};
    const begin = (this.#offsets[region] ?? 0) + blockId * blockLengthBytes;
    return this.#memories[tpRank]?.view(begin, blockLengthBytes) ?? new Uint8Array();
  }

  workersOutstanding(): Record<string, number> {
    const sums: Record<string, number> = {};
    for (const worker of this.#workers) {
      for (const [name, count] of Object.entries(worker.outstanding()))
        sums[name] = (sums[name] ?? 0) + count;
    }
    return sums;
  }

  async close(): Promise<void> {
    await this.#scheduler?.close();
    for (const worker of this.#workers) await worker.close();
    for (const memory of this.#memories) memory.close();
  }
}

/** Fills a memory part by part, since a view has a limit. */
function fillMemory(memory: Memory, value: number): void {
  const partBytes = 2 ** 30;
  for (let at = 0; at < memory.lengthBytes; at += partBytes) {
    memory.view(at, Math.min(partBytes, memory.lengthBytes - at)).fill(value);
  }
}
