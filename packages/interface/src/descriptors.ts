import { KvError } from "./errors.js";

/**
 * Memory types, by NIXL's names without the suffix `_SEG`.
 *
 * - `DRAM`: host memory.
 * - `VRAM`: device memory; `deviceId` is the device's ordinal in the owner's process.
 * - `FILE`, `OBJ`: a file or a stored object, which only the agent that registered it reaches, by
 * remote lists under its own name. Addresses are offsets in it. A WRITE replaces an object as a
 * whole, so a row must cover all of it.
 */
export type MemoryType = "DRAM" | "VRAM" | "FILE" | "OBJ";

/**
 * Rows `[address, lengthBytes, deviceId, strideBytes, count]`. A row stands for `count` descriptors
 * of `lengthBytes`, each beginning `strideBytes` after the last. Indices count them in order; they
 * are int32, so a list has at most 2^31 - 1 (NIXL: `nixl_xfer_dlist_t`).
 */
export interface DescriptorTable {
  readonly memoryType: MemoryType;
  /**
   * `DESCRIPTOR_ROW` numbers for each row, integers from 0 to 2^53 - 1; `lengthBytes` and `count`
   * are at least 1.
   */
  readonly rows: Float64Array;
  /**
   * True: the list takes over and detaches the buffer of `rows`, even when the call fails later.
   * False: the call copies the rows, 40 MB for a million.
   *
   * @throws `KV_LIST_INVALID` when the buffer cannot be detached.
   */
  readonly takeRows?: boolean | undefined;
}

/** Count of numbers in a row of a `DescriptorTable`. */
export const DESCRIPTOR_ROW = 5;

/** The descriptors of a transfer as pairs of indices. */
export interface DescriptorPairs {
  /**
   * Indices into the local list. `localIds[i]` pairs with `remoteIds[i]`, of the same length in
   * bytes.
   */
  readonly localIds: Int32Array;
  readonly remoteIds: Int32Array;
  readonly runs?: undefined;
  readonly offsets?: undefined;
}

/** The descriptors of a transfer as runs of consecutive indices. */
export interface DescriptorRuns {
  /**
   * Rows of `DESCRIPTOR_RUN` numbers, `[localId, remoteId, count]`: `count` local descriptors from
   * `localId` pair with the remote ones from `remoteId`. `count` is at least 1.
   */
  readonly runs: Int32Array;
  /**
   * Rows of `DESCRIPTOR_OFFSET` numbers, `[localOffset, remoteOffset]`. All runs move once for each
   * row, with the offsets added. As block ids are the same in all regions of a KV cache, each
   * region is a row. @default one row of zeros
   */
  readonly offsets?: Int32Array | undefined;
  readonly localIds?: undefined;
  readonly remoteIds?: undefined;
}

/** Count of numbers in a row of `DescriptorRuns.runs`. */
export const DESCRIPTOR_RUN = 3;

/** Count of numbers in a row of `DescriptorRuns.offsets`. */
export const DESCRIPTOR_OFFSET = 2;

/**
 * Expands runs into pairs in the order of the transfer; returns pairs unchanged. It allocates for
 * each descriptor, so keep it off the path of requests.
 */
export function descriptorPairs(descriptors: DescriptorPairs | DescriptorRuns): DescriptorPairs {
  if (descriptors.runs === undefined) return descriptors;
  const { runs, offsets = Int32Array.of(0, 0) } = descriptors;
  const localIds: number[] = [];
  const remoteIds: number[] = [];
  for (let row = 0; row < offsets.length; row += DESCRIPTOR_OFFSET) {
    for (let at = 0; at < runs.length; at += DESCRIPTOR_RUN) {
      const local = (offsets[row] as number) + (runs[at] as number);
      const remote = (offsets[row + 1] as number) + (runs[at + 1] as number);
      for (let step = 0; step < (runs[at + 2] as number); step++) {
        localIds.push(local + step);
        remoteIds.push(remote + step);
      }
    }
  }
  return { localIds: Int32Array.from(localIds), remoteIds: Int32Array.from(remoteIds) };
}

/**
 * Moves `source` into a new buffer without a copy, and detaches it. A `Memory.scatter` that copies
 * on another thread needs it: nobody can free the bytes meanwhile.
 *
 * @throws `KV_MEMORY_INVALID` when the buffer cannot be detached.
 */
export function takeBuffer(source: ArrayBuffer): ArrayBuffer {
  try {
    return structuredClone(source, { transfer: [source] });
  } catch (cause) {
    throw new KvError(
      "KV_MEMORY_INVALID",
      `the source of ${source.byteLength} bytes cannot be taken over: its buffer cannot be detached`,
      { hint: "pass a copy of it: source.slice(0)", cause },
    );
  }
}

/**
 * Moves `rows` into a new array without a copy, and detaches them, for a table with `takeRows`.
 *
 * @throws `KV_LIST_INVALID` when the buffer cannot be detached, such as a `SharedArrayBuffer` or
 * WebAssembly memory.
 */
export function takeRows(rows: Float64Array): Float64Array {
  try {
    return structuredClone(rows, { transfer: [rows.buffer as ArrayBuffer] });
  } catch (cause) {
    throw new KvError(
      "KV_LIST_INVALID",
      "takeRows is set, but the buffer of the rows cannot be detached",
      {
        hint: "pass a Float64Array with a buffer of its own, or leave takeRows out",
        cause,
      },
    );
  }
}
