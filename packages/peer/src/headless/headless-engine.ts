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
import { replaceCompatibilityHash } from "../protocol/remote-engine.js";

/** A region of a headless engine's KV cache, the same on every rank. */
export interface HeadlessRegion {
  readonly name: string;
  readonly numBlocks: number;
  /** Bytes of a kernel block on one rank. Blocks have no gaps. */
  readonly blockLengthBytes: number;
  /** Index into `cache.groups`; -1: all groups share the region. */
  readonly groupId: number;
}

/** How a headless engine reaches its peer. */
export interface Reach extends AmbientOptions {
  /** Allocates the cache and moves the blocks. The caller closes it. */
  readonly transport: Transport;
  /** The caller closes it. */
  readonly sideChannel: SideChannel;
  /** The address that the peer dials. @default "127.0.0.1" */
  readonly sideChannelHost?: string | undefined;
  /** 0 takes a free port. @default 0 */
  readonly sideChannelPort?: number | undefined;
}

/** A headless engine on either side of a pair. */
export interface HeadlessEngineOptions extends Omit<Reach, "sideChannelHost" | "sideChannelPort"> {
  readonly config: KvTransferConfig;
  readonly engine: EngineIdentity;
  readonly cache: KvCacheConfig;
  readonly regions: readonly HeadlessRegion[];
}

interface Settings extends HeadlessEngineOptions {
  readonly connector: ConnectorModule;
  readonly announcedHash: string | undefined;
  readonly keepExtension: boolean;
  readonly fill: number;
}

/** Runs engine steps without a model, with a worker per rank. */
export class HeadlessEngine {
  onOutput: (output: WorkerOutput) => void = () => {};
  readonly #settings: Settings;
  readonly #memories: Memory[] = [];
  readonly #workers: WorkerConnector[] = [];
  readonly #offsets: number[] = [];
  #scheduler: SchedulerConnector | undefined;

  private constructor(settings: Settings) {
    this.#settings = settings;
  }

  static async open(settings: Settings): Promise<HeadlessEngine> {
    const engine = new HeadlessEngine(settings);
    try {
      await engine.#open(ambient(settings));
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

  async #open(environment: Ambient): Promise<void> {
    const { config, engine, sideChannel, regions, cache, connector } = this.#settings;
    let lengthBytes = 0;
    for (const { numBlocks, blockLengthBytes } of regions) {
      this.#offsets.push(lengthBytes);
      lengthBytes += numBlocks * blockLengthBytes;
    }
    const shared = { config, engine, sideChannel, ...environment };
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
        this.onOutput(output);
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
    const platform = cpuPlatform();
    const worker = await connector.createWorker({
      ...shared,
      tpRank,
      ppRank: 0,
      transport,
      platform,
    });
    this.#workers.push(worker);
    await worker.registerKvCaches({
      config: cache,
      regions: regions.map((region, index) => ({
        ...region,
        memory,
        offsetBytes: this.#offsets[index] ?? 0,
        blockStrideBytes: region.blockLengthBytes,
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

  step(): void {
    const metadata = this.scheduler.buildStepMetadata();
    for (const worker of this.#workers) worker.startLoad(metadata);
  }

  block(tpRank: number, region: number, blockId: number): Uint8Array {
    const { blockLengthBytes = 0 } = this.#settings.regions[region] ?? {};
    const begin = (this.#offsets[region] ?? 0) + blockId * blockLengthBytes;
    return this.#memories[tpRank]?.view(begin, blockLengthBytes) ?? new Uint8Array();
  }

  outstanding(): Record<string, number> {
    const sums: Record<string, number> = {};
    for (const connector of [this.scheduler, ...this.#workers])
      for (const [name, count] of Object.entries(connector.outstanding()))
        sums[name] = (sums[name] ?? 0) + count;
    return sums;
  }

  async close(): Promise<void> {
    await this.#scheduler?.close();
    for (const worker of this.#workers) await worker.close();
    for (const memory of this.#memories) memory.close();
  }
}

/** In parts, because a view has a limit. */
function fillMemory(memory: Memory, value: number): void {
  const partBytes = 2 ** 30;
  for (let at = 0; at < memory.lengthBytes; at += partBytes)
    memory.view(at, Math.min(partBytes, memory.lengthBytes - at)).fill(value);
}
