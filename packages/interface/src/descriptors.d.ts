/**
 * Memory types, by NIXL's names without the suffix `_SEG`.
 *
 * - `DRAM`: host memory.
 * - `VRAM`: memory of a device; `deviceId` is the ordinal of the device in the owner's process.
 * - `FILE`, `OBJ`: a file, or an object of an object store. Only the agent that registered it
 * reaches it: its lists are remote lists under that
 *   agent's own name, the addresses of their rows are offsets in the file or object, and their device is its `deviceId`. A WRITE replaces an
 *   object as a whole, so a row of an object covers all of it.
 */
export type MemoryType = "DRAM" | "VRAM" | "FILE" | "OBJ";
/**
 * Descriptors in rows of five numbers, `[address, lengthBytes, deviceId, strideBytes, count]`. A
 * row stands for `count` descriptors of `lengthBytes` each; every descriptor begins `strideBytes`
 * after the one before it. A descriptor's index is its position when all rows are expanded in
 * order: row r begins at the sum of the counts of the rows before it. A list has at most 2^31 - 1
 * descriptors, as indices are int32.
 *
 * The counterpart in NIXL is `nixl_xfer_dlist_t`, with one entry for each descriptor.
 */
export interface DescriptorTable {
    /** Memory type of all rows. */
    readonly memoryType: MemoryType;
    /**
     * `DESCRIPTOR_ROW` numbers for each row. Every number is a non-negative integer below 2^53;
     * `lengthBytes` and `count` are at least 1.
     */
    readonly rows: Float64Array;
    /**
     * True: the list takes over the buffer of `rows`. The buffer is detached when the call returns,
     * also when the call fails later. False or absent: the rows are copied before the call returns,
     * which is 40 MB on the caller's thread for a million rows. Errors: `KV_LIST_INVALID` when the
     * buffer cannot be detached.
     */
    readonly takeRows?: boolean | undefined;
}
/** Count of numbers in a row of a `DescriptorTable`. */
export declare const DESCRIPTOR_ROW = 5;
/** The descriptors of a transfer as one pair of indices for each descriptor. */
export interface DescriptorPairs {
    /**
     * Indices into the local list. `localIds[i]` moves to or from `remoteIds[i]`; both descriptors
     * have the same length in bytes.
     */
    readonly localIds: Int32Array;
    /** Indices into the remote list, as many as `localIds` has. */
    readonly remoteIds: Int32Array;
    /** Absent: a request has either pairs or runs. */
    readonly runs?: undefined;
    /** Absent: offsets belong to runs. */
    readonly offsets?: undefined;
}
/**
 * The descriptors of a transfer as runs of consecutive indices, so that a long request stays short.
 */
export interface DescriptorRuns {
    /**
     * Rows of `DESCRIPTOR_RUN` numbers, `[localId, remoteId, count]`: descriptors `localId` to
     * `localId + count - 1` of the local list pair up with those of the remote list from `remoteId`
     * on. `count` is at least 1.
     */
    readonly runs: Int32Array;
    /**
     * Rows of `DESCRIPTOR_OFFSET` numbers, `[localOffset, remoteOffset]`. All runs move once for each
     * row, with the offsets added to their indices. The block ids of a request are the same in every
     * region of a KV cache, so this table has one row for each region, and `runs` one row for each
     * run of blocks. @default one row of zeros
     */
    readonly offsets?: Int32Array | undefined;
    /** Absent: a request has either pairs or runs. */
    readonly localIds?: undefined;
    /** Absent: a request has either pairs or runs. */
    readonly remoteIds?: undefined;
}
/** Count of numbers in a row of `DescriptorRuns.runs`. */
export declare const DESCRIPTOR_RUN = 3;
/** Count of numbers in a row of `DescriptorRuns.offsets`. */
export declare const DESCRIPTOR_OFFSET = 2;
/**
 * Expands runs into pairs, in the order in which a transfer moves them; returns pairs unchanged. It
 * allocates one number for each descriptor and side, so use it in reports and tests, not on the
 * path of a request. It does not validate.
 */
export declare function descriptorPairs(descriptors: DescriptorPairs | DescriptorRuns): DescriptorPairs;
/**
 * Moves the bytes of `source` into a new buffer, and detaches `source`; nothing is copied. An
 * implementation of `Memory.scatter` that copies on another thread calls it, so that nobody can
 * free the bytes meanwhile. Errors: `KV_MEMORY_INVALID` when the buffer cannot be detached.
 */
export declare function takeBuffer(source: ArrayBuffer): ArrayBuffer;
/**
 * Moves the numbers of `rows` into a new array that owns its buffer, and detaches the buffer of
 * `rows`; nothing is copied. A transport calls it for a table with `takeRows`. Errors:
 * `KV_LIST_INVALID` when the buffer cannot be detached, such as a `SharedArrayBuffer` or the memory
 * of a WebAssembly module.
 */
export declare function takeRows(rows: Float64Array): Float64Array;
