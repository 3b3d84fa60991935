import type { DescriptorTable } from "@kv/interface";
import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import type { PiecePlace } from "../kinds/cache-kind.js";
import type { RegionIndexing } from "./engine-plan-types.js";

/** One side of a segment: so many blocks of a region, cut into parts. */
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
  return {
    count: Math.floor(region.numBlocks / perBlock),
    strideBytes: region.blockStrideBytes * perBlock,
  };
}

/**
 * Where parts are evenly spaced over blocks they are one row; else part j of all blocks is a row. So the number of rows never depends on
 * the number of blocks. (vLLM 0.33 writes a row per block where there is padding.)
 */
function isEvenlySpaced({ parts, place }: SegmentSide, { strideBytes }: BlockSteps): boolean {
  return parts === 1 || strideBytes === parts * place.partStrideBytes;
}

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
      rows.push(address + part * place.partStrideBytes, lengthBytes, device, steps.strideBytes, steps.count);
    }
  }
  const memoryType = segments[0]?.region.memoryType ?? "DRAM";
  return Object.freeze({ memoryType, rows: Float64Array.from(rows) });
}
