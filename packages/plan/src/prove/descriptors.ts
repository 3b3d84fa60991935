import { DESCRIPTOR_ROW, type DescriptorTable } from "@kv/interface";
import type { TransferList } from "../engine/source-plans.js";
import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import type { RequestRead } from "../request/request-read.js";
import { fail } from "./proof-result.js";

export interface DescriptorRow {
  readonly firstId: number;
  readonly count: number;
  readonly address: number;
  readonly lengthBytes: number;
  readonly stride: number;
}

function descriptorRows({ rows }: DescriptorTable): readonly DescriptorRow[] {
  const found: DescriptorRow[] = [];
  let firstId = 0;
  for (let at = 0; at < rows.length; at += DESCRIPTOR_ROW) {
    const [address = 0, lengthBytes = 0, , stride = 0, count = 0] = rows.subarray(at);
    found.push({ firstId, count, address, lengthBytes, stride });
    firstId += count;
  }
  return found;
}

function rowIndexOf(rows: readonly DescriptorRow[], id: number): number {
  let [low, high] = [0, rows.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if ((rows[middle] as DescriptorRow).firstId <= id) low = middle;
    else high = middle - 1;
  }
  return low;
}

function addressOf(row: DescriptorRow, id: number): number {
  return row.address + (id - row.firstId) * row.stride;
}

/** A descriptor's memory, in a region of the rank that owns it. */
export interface MemoryPlace {
  readonly region: number;
  /** From the region's start. */
  readonly from: number;
  readonly lengthBytes: number;
}

/** Finds the memory of descriptors. */
export interface DescriptorLookup {
  readonly count: number;
  /** Memory outside a region's blocks ends the proof with "descriptor-outside". */
  place(id: number): MemoryPlace;
  rowIndex(id: number): number;
}

/** Creates a lookup for one table. `owner` is the subject of messages, such as "remote rank 3". */
export function descriptorLookup(
  owner: string,
  table: DescriptorTable,
  rank: RankGeometry,
): DescriptorLookup {
  const rows = descriptorRows(table);
  const count = rows.reduce((sum, row) => sum + row.count, 0);
  // Regions in different types of memory may have equal addresses.
  const own = [...rank.regions.entries()].filter(
    ([, { memoryType }]) => memoryType === table.memoryType,
  );
  // Ids come in long ascending stretches, so the last row and region come first.
  let lastRow = 0;
  let lastRegion = own[0];

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
    const within = ([, region]: [number, RegionGeometry], usesPadding: boolean) => {
      const { baseAddress, blockStrideBytes, blockLengthBytes, numBlocks } = region;
      const from = address - baseAddress;
      const last = usesPadding ? blockStrideBytes : blockLengthBytes;
      const end = (numBlocks - 1) * blockStrideBytes + last;
      return from >= 0 && from + lengthBytes <= end && from % blockStrideBytes < last;
    };
    // Blocks of several regions may interleave, so bytes in one region's padding may be another
    // region's.
    const intoBlock = ([, { baseAddress, blockStrideBytes }]: [number, RegionGeometry]) =>
      (address - baseAddress) % blockStrideBytes;
    const isNear = lastRegion !== undefined && within(lastRegion, false);
    for (const usesPadding of isNear ? [] : [false, true]) {
      const [found] = own
        .filter((one) => within(one, usesPadding))
        .sort((one, other) => intoBlock(one) - intoBlock(other));
      lastRegion = found;
      if (found !== undefined) break;
    }
    if (lastRegion !== undefined) {
      const [region, { baseAddress }] = lastRegion;
      return { region, from: address - baseAddress, lengthBytes };
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
 * Returns how many descriptors of a read remain when a transport merges those adjacent in memory on
 * both sides, as NIXL does. In a row, the stride must equal the length: heads' shares and padding
 * keep neighbours apart.
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
