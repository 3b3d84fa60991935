import type { DescriptorTable } from "@kv/interface";
import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import type { PiecePlace } from "../kinds/cache-kind.js";

/** Part `p` of a segment's block `b` is descriptor `offset + b * blockStep + p * partStep`. */
export interface RegionIndexing {
  readonly offset: number;
  /** 0 where the rank does not hold the segment. */
  readonly count: number;
  readonly blockStep: number;
  readonly partStep: number;
}

export interface SegmentSide {
  readonly region: RegionGeometry;
  readonly unit: "kernel-block" | "logical-block";
  readonly parts: number;
  readonly lengthBytes: number;
  readonly place: PiecePlace;
}

/**
 * Evenly spaced parts of all blocks are one row; otherwise each part of all blocks is one. So rows
 * do not grow with blocks. (vLLM 0.33 writes a row per block where there is padding.)
 */
function blocksOf(rank: RankGeometry, { region, unit, parts, place }: SegmentSide) {
  const perBlock = unit === "kernel-block" ? 1 : rank.physicalBlocksPerLogical;
  const strideBytes = region.blockStrideBytes * perBlock;
  return {
    count: region.numBlocks / perBlock,
    strideBytes,
    isEven: parts === 1 || strideBytes === parts * place.partStrideBytes,
  };
}

export function indexingOf(rank: RankGeometry, side: SegmentSide, offset: number): RegionIndexing {
  const { count, isEven } = blocksOf(rank, side);
  return Object.freeze({
    offset,
    count: count * side.parts,
    blockStep: isEven ? side.parts : 1,
    partStep: isEven ? 1 : count,
  });
}

export function tableOf(rank: RankGeometry, segments: readonly SegmentSide[]): DescriptorTable {
  const rows = segments.flatMap((segment) => {
    const { region, parts, lengthBytes, place } = segment;
    const { count, strideBytes, isEven } = blocksOf(rank, segment);
    const address = region.baseAddress + place.offsetBytes;
    const device = region.deviceId ?? rank.deviceId;
    if (isEven) {
      const stride = parts === 1 ? strideBytes : place.partStrideBytes;
      return [address, lengthBytes, device, stride, count * parts];
    }
    return Array.from({ length: parts }, (_, part) => [
      address + part * place.partStrideBytes,
      lengthBytes,
      device,
      strideBytes,
      count,
    ]).flat();
  });
  const memoryType = segments[0]?.region.memoryType ?? "DRAM";
  return Object.freeze({ memoryType, rows: Float64Array.from(rows) });
}
