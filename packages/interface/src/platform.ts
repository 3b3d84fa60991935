import type { Clock } from "./ambient.js";
import type { BlockIds, KvCacheConfig, KvCaches } from "./kv-cache.js";
import type { StagingStage } from "./staging-stage.js";
import type { MemoryType, Transport } from "./transport.js";

/**
 * A Platform says what an accelerator needs around a transfer: the shape of its cache, whether its memory can be registered,
 * and, where it cannot, how blocks are staged through host memory. Every implementation runs the suite
 * `@kv/conformance/platform`.
 */
export interface PlatformCapabilities {
  /** Memory types that this device's own memory can be registered as; empty when it must be staged. */
  readonly registersAs: readonly MemoryType[];
  /** Ways to register this device's memory as it is which exist and this platform does not take: it stages. Absent: none is known. */
  readonly directRegistration?: readonly DirectRegistration[] | undefined;
  /** `kv_buffer_device` values that work here; the first is the default. */
  readonly bufferDevices: readonly string[];
  /** Batches in flight at once; 1 means synchronous execution. */
  readonly maxConcurrentBatches: number;
}

export interface DirectRegistration {
  /** The backend that can, such as "LIBFABRIC". */
  readonly backend: string;
  readonly memoryType: MemoryType;
  /** What the machine must have for it, for people. */
  readonly needs: string;
}

/** Settings of an engine that a platform may refuse. Keys that a platform does not know are left alone (S1.4). */
export interface PlatformEngineSettings {
  readonly prefixCaching?: boolean | undefined;
  readonly maxNumSeqs?: number | undefined;
  readonly modelConfig?: Readonly<Record<string, unknown>> | undefined;
  readonly [key: string]: unknown;
}

export interface PlatformWarning {
  readonly setting: string;
  readonly message: string;
}

export interface Platform {
  /** "cpu", "cuda", "neuron", … */
  readonly deviceType: string;
  readonly capabilities: PlatformCapabilities;
  /** Dimensions of one layer's cache, outermost first. */
  kvCacheShape(shape: KvCacheShapeOptions): readonly number[];
  /** Longest sequence, read from the model's config. */
  maxModelLen(modelConfig: Readonly<Record<string, unknown>>): number;
  /** Throws `KV_PLATFORM_UNSUPPORTED` with the reason for a setting that cannot work; answers warnings for the rest. */
  check(settings: PlatformEngineSettings): readonly PlatformWarning[];
  /** Absent where the device's memory is registered as it is. `staged` of `@kv/connector` puts it around any connector. */
  createStaging?(options: StagingOptions): Promise<Staging>;
}

export interface KvCacheShapeOptions {
  readonly numBlocks: number;
  readonly blockSize: number;
  readonly numKvHeads: number;
  readonly headSize: number;
  readonly [key: string]: unknown;
}

export interface StagingOptions {
  readonly transport: Transport;
  readonly config: KvCacheConfig;
  /** The device's caches. */
  readonly caches: KvCaches;
  /**
   * Blocks of the pool: each region of `wireCaches` has so many, of the size of a device block. Besides it only pieces of copies that are
   * under way take host memory, so many at once that their sum has a bound of the platform's own. Block 0 is never saved nor loaded.
   */
  readonly poolBlocks: number;
  readonly clock?: Clock | undefined;
}

/** Pairs of block ids, per KV cache group: `wire[g][i]` in the pool stands for `device[g][i]`. */
export interface StagedBlocks {
  readonly device: BlockIds;
  readonly wire: BlockIds;
}

/** A bounded pool of host buffers that stands in for device memory on the wire. */
export interface Staging {
  /** What is registered and described to peers in place of the device's own caches: their layers, `poolBlocks` blocks each. */
  readonly wireCaches: KvCaches;
  /** What both copies do to a block, for `provePlan`. */
  readonly stage?: StagingStage | undefined;
  /** Copies device blocks to pool blocks, before a peer may read them. Errors: `KV_STAGING_FAILED`. */
  save(requestId: string, blocks: StagedBlocks): Promise<void>;
  /** Copies pool blocks to device blocks, after a transfer into them has landed. Errors: `KV_STAGING_FAILED`. */
  load(requestId: string, blocks: StagedBlocks): Promise<void>;
  /** After the connector has let go of the pool. */
  close(): Promise<void>;
}
