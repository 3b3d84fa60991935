import type { Clock } from "./ambient.js";
import type { BlockIds, KvCacheConfig, KvCaches } from "./kv-cache.js";
import type { Transport } from "./transport.js";

/** Options of `Platform.createStaging`. */
export interface StagingOptions {
  readonly transport: Transport;
  readonly config: KvCacheConfig;
  readonly caches: KvCaches;
  /**
   * Blocks in each region of `wireCaches`, as large as device blocks. Copies in progress use more
   * host memory, up to the platform's bound. Block 0 is never saved or loaded.
   */
  readonly poolBlocks: number;
  /** @default systemClock() */
  readonly clock?: Clock | undefined;
}

/**
 * Block ids for each KV cache group: pool block `wire[g][i]` holds the content of device block
 * `device[g][i]`.
 */
export interface StagedBlocks {
  readonly device: BlockIds;
  /** Each group has as many as in `device`. */
  readonly wire: BlockIds;
}

/** A bounded pool of host blocks that peers read and write in place of device memory. */
export interface Staging {
  /** What peers see: the device's layers with `poolBlocks` blocks each. */
  readonly wireCaches: KvCaches;
  /** Byte mapping between device and pool blocks, for `provePlan` of `@kv/plan`. */
  readonly layout?: StagingLayout | undefined;
  /**
   * Copies device blocks to pool blocks before a peer may read them.
   *
   * @throws `KV_STAGING_FAILED`.
   */
  save(requestId: string, blocks: StagedBlocks): Promise<void>;
  /**
   * Copies pool blocks to device blocks after a transfer has landed.
   *
   * @throws `KV_STAGING_FAILED`.
   */
  load(requestId: string, blocks: StagedBlocks): Promise<void>;
  /** Call it after the connector has deregistered the pool. */
  close(): Promise<void>;
}

/**
 * Which byte of a device block is which byte of a pool block, for all blocks and both directions.
 * `provePlan` of `@kv/plan` follows it. Derive it from the code that copies, so that the two agree.
 */
export interface StagingLayout {
  readonly planes: readonly StagedPlane[];
  /** Exactly one piece covers each byte of a plane's block, and each KV byte of a pool block. */
  readonly copies: readonly StagedCopy[];
}

/** One array of device blocks, and what their bytes mean. */
export interface StagedPlane {
  /** A name for reports, such as "model.layers.0 keys". */
  readonly name: string;
  /** Region of `wireCaches` that holds the plane's bytes. */
  readonly region: string;
  readonly order: "head-major" | "token-major";
  /** First byte of the plane's part of a pool cell, which is K then V of one head and token. */
  readonly cellBeginBytes: number;
  readonly cellBytes: number;
  readonly blockLengthBytes: number;
}

/**
 * `count` evenly spaced pieces of `lengthBytes`. Offsets are relative to the start of the block.
 */
export interface StagedCopy {
  /** Index into `StagingLayout.planes`. */
  readonly plane: number;
  readonly deviceOffsetBytes: number;
  readonly deviceStrideBytes: number;
  readonly wireOffsetBytes: number;
  readonly wireStrideBytes: number;
  readonly lengthBytes: number;
  readonly count: number;
}
