import type { Clock } from "./ambient.js";
import type { BlockIds, KvCacheConfig, KvCaches } from "./kv-cache.js";
import type { Transport } from "./transport.js";
/** Options of `Platform.createStaging`. */
export interface StagingOptions {
    /** Allocates the pool. */
    readonly transport: Transport;
    /** The engine's KV cache. */
    readonly config: KvCacheConfig;
    /** The device's caches. */
    readonly caches: KvCaches;
    /**
     * Blocks of the pool: each region of `wireCaches` has this many, each of the size of a device
     * block. Apart from the pool, only the pieces of copies in progress use host memory, up to a
     * bound that the platform sets. Block 0 is never saved or loaded.
     */
    readonly poolBlocks: number;
    /** Clock for the platform's timers. @default systemClock() */
    readonly clock?: Clock | undefined;
}
/**
 * Pairs of block ids for each KV cache group: pool block `wire[g][i]` holds the content of device
 * block `device[g][i]`.
 */
export interface StagedBlocks {
    /** Block ids on the device. */
    readonly device: BlockIds;
    /** Block ids in the pool, as many in each group as `device` has. */
    readonly wire: BlockIds;
}
/** A bounded pool of host blocks that peers read and write in place of device memory. */
export interface Staging {
    /**
     * Caches to register and to describe to peers in place of the device's: the same layers,
     * `poolBlocks` blocks each.
     */
    readonly wireCaches: KvCaches;
    /** Byte mapping between a device block and a pool block, for `provePlan` of `@kv/plan`. */
    readonly layout?: StagingLayout | undefined;
    /**
     * Copies device blocks to pool blocks, before a peer may read them. Errors: `KV_STAGING_FAILED`.
     */
    save(requestId: string, blocks: StagedBlocks): Promise<void>;
    /**
     * Copies pool blocks to device blocks, after a transfer into the pool has landed. Errors:
     * `KV_STAGING_FAILED`.
     */
    load(requestId: string, blocks: StagedBlocks): Promise<void>;
    /** Frees the pool. Call it after the connector has closed its registrations of the pool. */
    close(): Promise<void>;
}
/**
 * The byte mapping of a staging copy, as data: which byte of a device block corresponds to which
 * byte of a pool block. It describes one block and holds for every pair of blocks, in both
 * directions. `provePlan` of `@kv/plan` follows bytes through it. Derive it from the code that
 * copies, so that the two cannot disagree.
 */
export interface StagingLayout {
    /** All arrays of blocks on the device. */
    readonly planes: readonly StagedPlane[];
    /**
     * The copies. Every byte of a block of each plane is in exactly one piece, and so is every byte
     * of a pool block that carries KV.
     */
    readonly copies: readonly StagedCopy[];
}
/** One array of blocks on the device, and the meaning of the bytes of its blocks. */
export interface StagedPlane {
    /** Name for reports, such as "model.layers.0 keys". */
    readonly name: string;
    /** Name of the region of `wireCaches` that holds the plane's bytes. */
    readonly region: string;
    /** Order of heads and tokens within a block. */
    readonly order: "head-major" | "token-major";
    /**
     * First byte of this plane's part within a cell of the pool. A cell is K then V of one head and
     * token.
     */
    readonly cellBeginBytes: number;
    /** Bytes of a cell that this plane holds, from `cellBeginBytes` on. */
    readonly cellBytes: number;
    /** Bytes of one block of the plane. */
    readonly blockLengthBytes: number;
}
/**
 * `count` pieces of `lengthBytes`, evenly spaced on both sides. Offsets are relative to the begin
 * of the block.
 */
export interface StagedCopy {
    /** Index into `StagingLayout.planes`. */
    readonly plane: number;
    /** Offset of the first piece in the device block. */
    readonly deviceOffsetBytes: number;
    /** Distance between the begins of two pieces in the device block. */
    readonly deviceStrideBytes: number;
    /** Offset of the first piece in the pool block. */
    readonly wireOffsetBytes: number;
    /** Distance between the begins of two pieces in the pool block. */
    readonly wireStrideBytes: number;
    /** Bytes of each piece. */
    readonly lengthBytes: number;
    /** Count of pieces. */
    readonly count: number;
}
