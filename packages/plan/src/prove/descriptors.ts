import type { DescriptorTable } from "@kv/interface";
import {
  addressOf,
  type DescriptorRow,
  descriptorRows,
  rowIndexOf,
} from "../engine/descriptor-tables.js";
import type { RegionIndexing, SegmentPlan, TransferList } from "../engine/engine-plan-types.js";
import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import type { RequestRead } from "../request/request-plan-types.js";
import { blockBytes } from "./block-labels.js";
import { fail } from "./proof-result.js";
import { counterpart, type ProofSubject } from "./proof-subject.js";

/** The memory of a descriptor: bytes of a region of the rank that owns it. */
export interface MemoryPlace {
  /** Index of the region. */
  readonly region: number;
  /** Bytes from the region's begin. */
  readonly from: number;
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
 * Proves for all tables of a plan that every block of each segment has descriptors, and that each
 * part has the same place within every block. So the proof of a sampled request holds for any
 * blocks. Returns the number of descriptors.
 */
export function proveTables({ plan, remotes, lookups }: ProofSubject): number {
  let descriptors = 0;
  for (const [index, source] of plan.sources.entries()) {
    const rank = remotes[index] as RankGeometry;
    for (const number of source.segments) {
      const segment = plan.segments[number];
      const region = plan.local.regions[segment?.region ?? -1];
      const remoteRegion = region && counterpart(region, rank, plan.local);
      const lookup = lookups[index]?.[segment?.list ?? -1];
      const [mine, theirs] = [plan.localIndexing[number], source.remoteIndexing[number]];
      if (!segment || !lookup || !mine || !theirs || remoteRegion === undefined)
        fail(
          "descriptor-step",
          `segment ${number} of the source at rank ${rank.tpRank} has no descriptors`,
          { segment: number },
        );
      const { region: own, localParts, remoteParts } = segment;
      proveSegment("local", plan.local, own, segment, mine, localParts, lookup.local);
      const owner = `remote rank ${rank.tpRank}`;
      proveSegment(owner, rank, remoteRegion, segment, theirs, remoteParts, lookup.remote);
    }
    for (const { local, remote } of lookups[index] ?? []) descriptors += local.count + remote.count;
  }
  return descriptors;
}

/**
 * Descriptors of a row are evenly spaced: where all blocks of a part are in one row, three of them
 * (first, second, last) decide for all.
 */
function proveSegment(
  owner: string,
  rank: RankGeometry,
  index: number,
  { unit, piece, lengthBytes }: SegmentPlan,
  { offset, blockStep, partStep }: RegionIndexing,
  parts: number,
  lookup: DescriptorLookup,
): void {
  const region = rank.regions[index] as RegionGeometry;
  const kernelBlocks = unit === "kernel-block" ? 1 : rank.physicalBlocksPerLogical;
  const strideBytes = region.blockStrideBytes * kernelBlocks;
  const bytes = blockBytes(region, { kernelBlocks, usesPadding: unit === "logical-block" });
  const count = Math.floor(region.numBlocks / kernelBlocks);
  const begin = lookup.place(offset).from;
  const partBytes = parts === 1 ? 0 : lookup.place(offset + partStep).from - begin;
  for (let part = 0; part < parts; part++) {
    const into = begin + part * partBytes;
    const id = (block: number) => offset + block * blockStep + part * partStep;
    const isOneRow = lookup.rowIndex(id(0)) === lookup.rowIndex(id(count - 1));
    const looked = isOneRow ? [0, Math.min(1, count - 1), count - 1] : [...Array(count).keys()];
    for (const block of looked) {
      const place = lookup.place(id(block));
      const expected = block * strideBytes + into;
      const isRight =
        place.region === index &&
        place.from === expected &&
        place.lengthBytes === lengthBytes &&
        into >= 0 &&
        into + lengthBytes <= bytes;
      if (isRight) continue;
      const name = `"${region.name}" ${piece}`.trim();
      fail(
        "descriptor-step",
        `${owner}: part ${part} of block ${block} of ${name} is ${place.lengthBytes} bytes at ${place.from} of region ` +
          `${place.region}; expected ${lengthBytes} bytes at ${expected} of region ${index}, within a block of ${bytes}`,
        { region: index, block, part },
      );
    }
  }
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
