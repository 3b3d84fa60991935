import { DESCRIPTOR_ROW, type DescriptorTable } from "@kv/interface";
import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import type { PiecePlace } from "../kinds/cache-kind.js";

/**
 * The place of a segment in a table: part `p` of block `b` is descriptor
 * `offset + b * blockStep + p * partStep`.
 */
export interface RegionIndexing {
  /** Id of the segment's first descriptor. */
  readonly offset: number;
  /** Descriptors of the segment; 0 where the rank does not hold it. */
  readonly count: number;
  /** Ids from one block to the next. */
  readonly blockStep: number;
  /** Ids from one part of a block to the next. */
  readonly partStep: number;
}

/** One side of a segment: the blocks of a region, cut into parts. */
export interface SegmentSide {
  readonly region: RegionGeometry;
  readonly unit: "kernel-block" | "logical-block";
  readonly parts: number;
  readonly lengthBytes: number;
  readonly place: PiecePlace;
}

interface BlockSteps {
  readonly count: number;
  readonly strideBytes: number;
}

function blockSteps(rank: RankGeometry, { region, unit }: SegmentSide): BlockSteps {
  const perBlock = unit === "kernel-block" ? 1 : rank.physicalBlocksPerLogical;
  // `checkRankGeometry` has refused a count that the ratio does not divide.
  return { count: region.numBlocks / perBlock, strideBytes: region.blockStrideBytes * perBlock };
}

/**
 * Whether the parts of all blocks are evenly spaced: then they are one row. Otherwise part `j` of
 * all blocks is a row. So the number of rows does not depend on the number of blocks. (vLLM 0.33
 * writes a row per block where there is padding.)
 */
function isEvenlySpaced({ parts, place }: SegmentSide, { strideBytes }: BlockSteps): boolean {
  return parts === 1 || strideBytes === parts * place.partStrideBytes;
}

/** The place of a segment that begins at descriptor `offset` of a table. */
export function indexingOf(rank: RankGeometry, side: SegmentSide, offset: number): RegionIndexing {
  const steps = blockSteps(rank, side);
  const even = isEvenlySpaced(side, steps);
  return Object.freeze({
    offset,
    count: steps.count * side.parts,
    blockStep: even ? side.parts : 1,
    partStep: even ? 1 : steps.count,
  });
}

/** The descriptor table of segments, one after another. */
export function tableOf(rank: RankGeometry, segments: readonly SegmentSide[]): DescriptorTable {
  const rows: number[] = [];
  for (const segment of segments) {
    const { region, parts, lengthBytes, place } = segment;
    const steps = blockSteps(rank, segment);
    const address = region.baseAddress + place.offsetBytes;
    const device = region.deviceId ?? rank.deviceId;
    if (isEvenlySpaced(segment, steps)) {
      const stride = parts === 1 ? steps.strideBytes : place.partStrideBytes;
      rows.push(address, lengthBytes, device, stride, steps.count * parts);
      continue;
    }
    for (let part = 0; part < parts; part++) {
      rows.push(
        address + part * place.partStrideBytes,
        lengthBytes,
        device,
        steps.strideBytes,
        steps.count,
      );
    }
  }
  const memoryType = segments[0]?.region.memoryType ?? "DRAM";
  return Object.freeze({ memoryType, rows: Float64Array.from(rows) });
}

/** A row of a descriptor table, with the id of its first descriptor. */
export interface DescriptorRow {
  readonly firstId: number;
  readonly count: number;
  readonly address: number;
  readonly lengthBytes: number;
  readonly stride: number;
}

/** The rows of a table, with their descriptor ids. */
export function descriptorRows({ rows }: DescriptorTable): readonly DescriptorRow[] {
  const found: DescriptorRow[] = [];
  let firstId = 0;
  for (let at = 0; at < rows.length; at += DESCRIPTOR_ROW) {
    const [address = 0, lengthBytes = 0, , stride = 0, count = 0] = rows.subarray(
      at,
      at + DESCRIPTOR_ROW,
    );
    found.push({ firstId, count, address, lengthBytes, stride });
    firstId += count;
  }
  return found;
}

/** Index of the row that holds `id`; for an id outside of the table, of the nearest row. */
export function rowIndexOf(rows: readonly DescriptorRow[], id: number): number {
  let [low, high] = [0, rows.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if ((rows[middle] as DescriptorRow).firstId <= id) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Address of the descriptor `id`, which `row` holds. */
export function addressOf(row: DescriptorRow, id: number): number {
  return row.address + (id - row.firstId) * row.stride;
}
