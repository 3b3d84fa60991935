import type { DescriptorTable } from "@kv/interface";
import type { RegionIndexing } from "./engine-plan-types.js";
import type { RankGeometry, RegionGeometry } from "./geometry.js";

/**
 * Local descriptors of a region whose blocks are cut into `parts`. Where blocks abut, the parts of all blocks are one evenly spaced row;
 * where there is padding, part j of all blocks is a row. So the number of rows never depends on the number of blocks.
 * (vLLM 0.33 writes a row per block where there is padding.)
 */
function regionIndexing(region: RegionGeometry, parts: number, offset: number): RegionIndexing {
  const evenlySpaced = parts === 1 || region.blockStrideBytes === region.blockLengthBytes;
  return Object.freeze({
    offset,
    count: region.numBlocks * parts,
    blockStep: evenlySpaced ? parts : 1,
    partStep: evenlySpaced ? 1 : region.numBlocks,
  });
}

export function indexRegions(regions: readonly RegionGeometry[], parts: number): readonly RegionIndexing[] {
  let offset = 0;
  return Object.freeze(
    regions.map((region) => {
      const indexing = regionIndexing(region, parts, offset);
      offset += indexing.count;
      return indexing;
    }),
  );
}

/** Rows of one region: `lengthBytes` at `offsetBytes` into each of the `parts` of each block. */
interface RegionRows {
  readonly region: RegionGeometry;
  readonly parts: number;
  readonly offsetBytes: number;
  readonly lengthBytes: number;
}

export function descriptorTable(rank: RankGeometry, regions: readonly RegionRows[]): DescriptorTable {
  const rows: number[] = [];
  for (const { region, parts, offsetBytes, lengthBytes } of regions) {
    const partBytes = region.blockLengthBytes / parts;
    const address = region.baseAddress + offsetBytes;
    const { deviceId } = rank;
    if (parts === 1) {
      rows.push(address, lengthBytes, deviceId, region.blockStrideBytes, region.numBlocks);
    } else if (region.blockStrideBytes === region.blockLengthBytes) {
      rows.push(address, lengthBytes, deviceId, partBytes, region.numBlocks * parts);
    } else {
      for (let part = 0; part < parts; part++) {
        rows.push(
          address + part * partBytes,
          lengthBytes,
          deviceId,
          region.blockStrideBytes,
          region.numBlocks,
        );
      }
    }
  }
  const memoryType = rank.regions[0]?.memoryType ?? "DRAM";
  return Object.freeze({ memoryType, rows: Float64Array.from(rows) });
}
