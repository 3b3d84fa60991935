import type { KvCacheConfig, KvCaches } from "./kv-cache.js";
import type { Agent, MemoryType, Transport } from "./transport.js";

/**
 * A Platform says what an accelerator needs around a transfer: the shape of its cache, whether its memory can be registered,
 * and, where it cannot, how blocks are staged through host memory. Every implementation runs the suite
 * `@kv/conformance/platform`.
 */
export interface PlatformCapabilities {
  /** Memory types that this device's own memory can be registered as; empty when it must be staged. */
  readonly registersAs: readonly MemoryType[];
  /** `kv_buffer_device` values that work here; the first is the default. */
  readonly bufferDevices: readonly string[];
  /** Batches in flight at once; 1 means synchronous execution. */
  readonly maxConcurrentBatches: number;
}

/** Settings of an engine that a platform may refuse. Keys that a platform does not know are left alone (S1.4). */
export interface PlatformEngineSettings {
  readonly prefixCaching?: boolean;
  readonly maxNumSeqs?: number;
  readonly modelConfig?: Readonly<Record<string, unknown>>;
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
  /** Absent where the device's memory is registered as it is. */
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
  readonly agent: Agent;
  readonly config: KvCacheConfig;
  /** The device's caches. */
  readonly caches: KvCaches;
  /** Upper bound of host memory that may be used. */
  readonly poolLengthBytes?: number;
}

/** Host buffers that stand in for device memory on the wire. */
export interface Staging {
  /** What is registered and described to peers in place of the device's own caches. */
  readonly wireCaches: KvCaches;
  /** Copies device blocks to their host buffers, before a peer may read them. Errors: `KV_STAGING_FAILED`. */
  save(requestId: string, groups: readonly (readonly number[])[]): Promise<void>;
  /** Copies host buffers to device blocks, after a transfer into them has landed. Errors: `KV_STAGING_FAILED`. */
  load(requestId: string, groups: readonly (readonly number[])[]): Promise<void>;
  close(): Promise<void>;
}
