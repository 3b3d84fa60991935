import type { DescriptorTable } from "@kv/interface";
import {
  addressOf,
  type DescriptorRow,
  descriptorRows,
  rowIndexOf,
} from "../engine/descriptor-tables.js";
import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import { fail } from "./proof-result.js";

/** The memory of a descriptor: bytes of a region of the rank that owns it. */
export interface MemoryPlace {
  /** Index of the region. */
  readonly region: number;
  /** Bytes from the region's begin. */
  readonly from: number;
  /** Bytes of the descriptor. */
  readonly lengthBytes: number;
}

/** Finds the memory of descriptors, from the rows of a table and the regions of the rank. */
export interface DescriptorLookup {
  /** Descriptors of the table. */
  readonly count: number;
  /**
   * The memory of a descriptor. Ends the proof with "descriptor-outside" for memory outside of the
   * blocks of a region.
   */
  place(id: number): MemoryPlace;
  /** Index of the row that holds a descriptor. */
  rowIndex(id: number): number;
}

/** A lookup for one table. `owner` is the subject of messages: "local" or "remote rank 3". */
export function descriptorLookup(
  owner: string,
  table: DescriptorTable,
  rank: RankGeometry,
): DescriptorLookup {
  const rows = descriptorRows(table);
  const count = rows.reduce((sum, row) => sum + row.count, 0);
  // Regions in different types of memory may have equal addresses.
  const ordered = [...rank.regions.entries()]
    .filter(([, region]) => region.memoryType === table.memoryType)
    .sort(([, one], [, two]) => one.baseAddress - two.baseAddress);
  // Ids come in long ascending stretches: the row and the region of the last one are tried first.
  let lastRow = 0;
  let lastRegion = ordered[0]?.[0] ?? 0;

  function rowIndex(id: number): number {
    const near = rows[lastRow];
    if (near !== undefined && id >= near.firstId && id < near.firstId + near.count) return lastRow;
    const found = rowIndexOf(rows, id);
    const row = rows[found];
    if (row === undefined || !Number.isInteger(id) || id < 0 || id >= row.firstId + row.count) {
      fail(
        "descriptor-outside",
        `${owner}: id ${id} is not among the ${count} descriptors of its table`,
        {
          id,
          count,
        },
      );
    }
    lastRow = found;
    return found;
  }

  const intoBlock = ({ region, from }: MemoryPlace) =>
    from % (rank.regions[region] as RegionGeometry).blockStrideBytes;

  function place(id: number): MemoryPlace {
    const row = rows[rowIndex(id)] as DescriptorRow;
    const address = addressOf(row, id);
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
    // Blocks of several regions may interleave: what begins in the padding of one is another's, if
    // there is one; else that of the block before.
    const candidates = ordered
      .filter(([, region]) => region.baseAddress <= address)
      .map(([index]) => index);
    for (const usesPadding of [false, true]) {
      const [found] = candidates
        .flatMap((index) => within(index, usesPadding) ?? [])
        .sort((one, other) => intoBlock(one) - intoBlock(other));
      if (found === undefined) continue;
      lastRegion = found.region;
      return found;
    }
    return fail(
      "descriptor-outside",
      `${owner}: descriptor ${id}, ${row.lengthBytes} bytes at ${address}, lies within no block of any region`,
      { id, address, lengthBytes: row.lengthBytes },
    );
  }

  return { count, place, rowIndex };
}
