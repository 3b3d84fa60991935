import {
  DESCRIPTOR_ROW,
  type DescriptorTable,
  type KvCacheKind,
  type KvCacheLayout,
} from "@kv/interface";
import { kvHeadsOfRank } from "@kv/topology";
import type { RankGeometry } from "../../src/index.js";

/** Bytes of one head and token; large enough for a cell's label. */
export const CELL_BYTES = 4;

export interface EngineShape {
  readonly tpSize: number;
  readonly kernelBlockSize: number;
  readonly physicalBlocksPerLogical: number;
  readonly layout: KvCacheLayout;
  readonly paddingBytes: number;
  readonly numLogicalBlocks: number;
  /** Group of each region; -1 shared. */
  readonly regionGroups: readonly number[];
}

export interface ModelShape {
  readonly numKvHeads: number;
  readonly groups: readonly KvCacheKind[];
}

/** One rank: its handshake geometry, and one buffer per region. */
export interface Rank {
  readonly geometry: RankGeometry;
  readonly bytes: readonly Uint8Array[];
  readonly firstHead: number;
  readonly numHeads: number;
}

const REGION_SPACING = 2 ** 24;

/** All ranks of an engine, their memory filled with `filler`. */
export function engineOf(
  shape: EngineShape,
  model: ModelShape,
  firstAddress: number,
  filler: number,
): Rank[] {
  const isMla = model.groups.includes("mla");
  return Array.from({ length: shape.tpSize }, (_, tpRank) => {
    const heads = isMla
      ? { firstHead: 0, numHeads: 1 }
      : kvHeadsOfRank(tpRank, shape.tpSize, model.numKvHeads);
    const blockLengthBytes = heads.numHeads * shape.kernelBlockSize * CELL_BYTES;
    const blockStrideBytes = blockLengthBytes + shape.paddingBytes;
    const numBlocks = shape.numLogicalBlocks * shape.physicalBlocksPerLogical;
    const geometry: RankGeometry = {
      tpRank,
      tpSize: shape.tpSize,
      kernelBlockSize: shape.kernelBlockSize,
      physicalBlocksPerLogical: shape.physicalBlocksPerLogical,
      layout: shape.layout,
      attentionBackend: "FLASH_ATTN",
      deviceId: 0,
      regions: shape.regionGroups.map((groupId, index) => ({
        name: `layer.${index}`,
        baseAddress: firstAddress + (tpRank * shape.regionGroups.length + index) * REGION_SPACING,
        numBlocks,
        blockLengthBytes,
        blockStrideBytes,
        groupId,
        memoryType: "DRAM",
      })),
    };
    const bytes = geometry.regions.map(() =>
      new Uint8Array(numBlocks * blockStrideBytes).fill(filler),
    );
    return { geometry, bytes, ...heads };
  });
}

/**
 * Offset in the region of the cell of a head (counted within the rank) and a token of the block.
 */
export function cellOffset(
  rank: Rank,
  region: number,
  block: number,
  head: number,
  token: number,
): number {
  const { layout, kernelBlockSize, regions } = rank.geometry;
  const tokenMajor = layout === "LBNHC" || layout === "BLNHC";
  const cell = tokenMajor ? token * rank.numHeads + head : head * kernelBlockSize + token;
  return block * (regions[region]?.blockStrideBytes ?? 0) + cell * CELL_BYTES;
}

/** Different for every layer, group, head and token; never the filler or zero. */
export function label(region: number, group: number, head: number, token: number): number {
  return 1 + token + 2 ** 11 * (head + 2 ** 7 * (region + 2 ** 4 * group));
}

/**
 * The kernel block of a token and the token's index in it, from its group's logical block table.
 */
export function placeOf(
  rank: Rank,
  table: readonly number[],
  token: number,
): { block: number; token: number } {
  const { kernelBlockSize, physicalBlocksPerLogical } = rank.geometry;
  const index = Math.floor(token / kernelBlockSize);
  const logical = table[Math.floor(index / physicalBlocksPerLogical)] ?? -1;
  return {
    block: logical * physicalBlocksPerLogical + (index % physicalBlocksPerLogical),
    token: token % kernelBlockSize,
  };
}

export function expandTable(table: DescriptorTable): { address: number; lengthBytes: number }[] {
  const expanded: { address: number; lengthBytes: number }[] = [];
  for (let at = 0; at < table.rows.length; at += DESCRIPTOR_ROW) {
    const [address = 0, lengthBytes = 0, , stride = 0, count = 0] = table.rows.subarray(
      at,
      at + DESCRIPTOR_ROW,
    );
    for (let index = 0; index < count; index++)
      expanded.push({ address: address + index * stride, lengthBytes });
  }
  return expanded;
}

/** The bytes at an address. They must be within one block of one region of the rank. */
export function viewAt(
  rank: Rank,
  address: number,
  lengthBytes: number,
): { region: number; start: number } {
  const region = rank.geometry.regions.findIndex(({ baseAddress, blockStrideBytes, numBlocks }) => {
    return address >= baseAddress && address < baseAddress + numBlocks * blockStrideBytes;
  });
  const found = rank.geometry.regions[region];
  if (found === undefined)
    throw new Error(`no region of rank ${rank.geometry.tpRank} holds address ${address}`);
  const start = address - found.baseAddress;
  if ((start % found.blockStrideBytes) + lengthBytes > found.blockLengthBytes) {
    throw new Error(`${lengthBytes} bytes at ${address} leave their block`);
  }
  return { region, start };
}
