import { DESCRIPTOR_ROW, type DescriptorTable } from "@kv/interface";
import type { RankGeometry } from "../geometry.js";
import { fail } from "./verdict.js";

/** Where a descriptor points, in the words of the rank that owns the memory. */
export interface MemoryPlace {
  readonly region: number;
  /** Bytes from the region's begin. */
  readonly from: number;
  readonly lengthBytes: number;
}

/** From a descriptor's index to the memory it names, by nothing but the table's rows and the rank's own regions. */
export interface NamedMemory {
  readonly count: number;
  place(id: number): MemoryPlace;
  /** Number of the row that a descriptor is of. */
  rowIndex(id: number): number;
}

interface Row {
  readonly firstId: number;
  readonly count: number;
  readonly address: number;
  readonly lengthBytes: number;
  readonly stride: number;
}

/** `whose` is for messages: "local" or "remote rank 3". */
export function namedMemory(whose: string, table: DescriptorTable, rank: RankGeometry): NamedMemory {
  const rows: Row[] = [];
  let count = 0;
  for (let at = 0; at < table.rows.length; at += DESCRIPTOR_ROW) {
    const [address = 0, lengthBytes = 0, , stride = 0, items = 0] = table.rows.subarray(
      at,
      at + DESCRIPTOR_ROW,
    );
    rows.push({ firstId: count, count: items, address, lengthBytes, stride });
    count += items;
  }
  // Regions of unlike memory types may have equal addresses.
  const ordered = [...rank.regions.entries()]
    .filter(([, region]) => region.memoryType === table.memoryType)
    .sort(([, one], [, two]) => one.baseAddress - two.baseAddress);
  // Ids come in long ascending stretches: the row and the region of the last one are tried first.
  let lastRow = 0;
  let lastRegion = ordered[0]?.[0] ?? 0;

  function rowIndex(id: number): number {
    const near = rows[lastRow];
    if (near !== undefined && id >= near.firstId && id < near.firstId + near.count) return lastRow;
    let [low, high] = [0, rows.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if ((rows[middle] as Row).firstId <= id) low = middle;
      else high = middle - 1;
    }
    const row = rows[low];
    if (row === undefined || !Number.isInteger(id) || id < 0 || id >= row.firstId + row.count) {
      fail("descriptor-outside", `${whose}: id ${id} is not among the ${count} descriptors of its table`, {
        id,
        count,
      });
    }
    lastRow = low;
    return low;
  }

  function place(id: number): MemoryPlace {
    const row = rows[rowIndex(id)] as Row;
    const address = row.address + (id - row.firstId) * row.stride;
    const within = (index: number, usesPadding: boolean): MemoryPlace | undefined => {
      const region = rank.regions[index];
      if (region === undefined || address < region.baseAddress) return undefined;
      const from = address - region.baseAddress;
      const last = usesPadding ? region.blockStrideBytes : region.blockLengthBytes;
      const end = (region.numBlocks - 1) * region.blockStrideBytes + last;
      if (from + row.lengthBytes > end || from % region.blockStrideBytes >= last) return undefined;
      return { region: index, from, lengthBytes: row.lengthBytes };
    };
    const near = within(lastRegion, false);
    if (near !== undefined) return near;
    // Blocks of several regions may interleave: what begins in the padding of one is another's, if there is one.
    for (const usesPadding of [false, true]) {
      for (const [index, region] of ordered) {
        if (region.baseAddress > address) break;
        const found = within(index, usesPadding);
        if (found === undefined) continue;
        lastRegion = index;
        return found;
      }
    }
    return fail(
      "descriptor-outside",
      `${whose}: descriptor ${id}, ${row.lengthBytes} bytes at ${address}, lies within no block of any region`,
      { id, address, lengthBytes: row.lengthBytes },
    );
  }

  return { count, place, rowIndex };
}
