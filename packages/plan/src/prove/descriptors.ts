import type { DescriptorTable } from "@kv/interface";
import {
  addressOf,
  type DescriptorRow,
  descriptorRows,
  rowIndexOf,
} from "../engine/descriptor-tables.js";
import type { TransferList } from "../engine/source-plans.js";
import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import type { RequestRead } from "../request/request-read.js";
import { fail } from "./proof-result.js";

/** The memory of a descriptor: bytes of a region of the rank that owns it. */
export interface MemoryPlace {
  readonly region: number;
  /** Bytes from the region's begin. */
  readonly from: number;
  readonly lengthBytes: number;
}

/** Finds the memory of descriptors, from the rows of a table and the regions of the rank. */
export interface DescriptorLookup {
  readonly count: number;
  /**
   * The memory of a descriptor. Ends the proof with "descriptor-outside" for memory outside of the
   * blocks of a region.
   */
  place(id: number): MemoryPlace;
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
  const own = [...rank.regions.keys()].filter(
    (index) => rank.regions[index]?.memoryType === table.memoryType,
  );
  // Ids come in long ascending stretches: the row and the region of the last one are tried first.
  let lastRow = 0;
  let lastRegion = own[0] ?? 0;

  function rowIndex(id: number): number {
    const near = rows[lastRow];
    if (near !== undefined && id >= near.firstId && id < near.firstId + near.count) return lastRow;
    const found = rowIndexOf(rows, id);
    const row = rows[found];
    if (row === undefined || !Number.isInteger(id) || id < 0 || id >= row.firstId + row.count)
      fail(
        "descriptor-outside",
        `${owner}: id ${id} is not among the ${count} descriptors of its table`,
        { id, count },
      );
    lastRow = found;
    return found;
  }

  function place(id: number): MemoryPlace {
    const row = rows[rowIndex(id)] as DescriptorRow;
    const { lengthBytes } = row;
    const address = addressOf(row, id);
    const within = (index: number, usesPadding: boolean): MemoryPlace | undefined => {
      const region = rank.regions[index];
      if (region === undefined || address < region.baseAddress) return undefined;
      const from = address - region.baseAddress;
      const last = usesPadding ? region.blockStrideBytes : region.blockLengthBytes;
      const end = (region.numBlocks - 1) * region.blockStrideBytes + last;
      if (from + lengthBytes > end || from % region.blockStrideBytes >= last) return undefined;
      return { region: index, from, lengthBytes };
    };
    const near = within(lastRegion, false);
    if (near !== undefined) return near;
    // Blocks of several regions may interleave: what begins in the padding of one is another's, if
    // there is one; else that of the block before.
    const intoBlock = ({ region, from }: MemoryPlace) =>
      from % (rank.regions[region] as RegionGeometry).blockStrideBytes;
    for (const usesPadding of [false, true]) {
      const [found] = own
        .flatMap((index) => within(index, usesPadding) ?? [])
        .sort((one, other) => intoBlock(one) - intoBlock(other));
      if (found === undefined) continue;
      lastRegion = found.region;
      return found;
    }
    return fail(
      "descriptor-outside",
      `${owner}: descriptor ${id}, ${lengthBytes} bytes at ${address}, lies within no block of any region`,
      { id, address, lengthBytes },
    );
  }

  return { count, place, rowIndex };
}

/**
 * The number of descriptors of a read that remain when a transport merges neighbours that are
 * adjacent in memory on both sides, as NIXL does. Within a row of a table neighbours are adjacent
 * where the stride equals the length: a head's share of a block does not reach the next block's
 * share, and padding parts whole blocks.
 */
export function mergedDescriptorCount(
  { runs }: Pick<RequestRead, "runs">,
  list: TransferList,
): number {
  const [local, remote] = [descriptorRows(list.localTable), descriptorRows(list.remoteTable)];
  const rowAt = (rows: readonly DescriptorRow[], id: number) =>
    rows[rowIndexOf(rows, id)] as DescriptorRow;
  let pieces = 0;
  let [localEnd, remoteEnd] = [Number.NaN, Number.NaN];
  for (let at = 0; at < runs.length; at += 3) {
    let [localId = 0, remoteId = 0, left = 0] = runs.subarray(at, at + 3);
    while (left > 0) {
      const [mine, theirs] = [rowAt(local, localId), rowAt(remote, remoteId)];
      const count = Math.min(
        left,
        mine.firstId + mine.count - localId,
        theirs.firstId + theirs.count - remoteId,
      );
      const [to, from] = [addressOf(mine, localId), addressOf(theirs, remoteId)];
      const isDense = mine.stride === mine.lengthBytes && theirs.stride === theirs.lengthBytes;
      const goesOn = to === localEnd && from === remoteEnd;
      pieces += (isDense ? 1 : count) - (goesOn ? 1 : 0);
      localEnd = addressOf(mine, localId + count - 1) + mine.lengthBytes;
      remoteEnd = addressOf(theirs, remoteId + count - 1) + theirs.lengthBytes;
      localId += count;
      remoteId += count;
      left -= count;
    }
  }
  return pieces;
}
