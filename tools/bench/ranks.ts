import type { RankGeometry } from "@kv/plan";

/** Tokens of a block. */
export const BLOCK_SIZE = 16;

export interface RanksOptions {
  readonly numKvHeads: number;
  readonly tpSize?: number;
  /** One for each layer. */
  readonly regions?: number;
  /** KV cache groups, to which the regions belong in turn. */
  readonly groups?: number;
  readonly numBlocks?: number;
}

/** The ranks of an engine on GPUs. A head has 512 bytes per token, keys and values. */
export function ranksOf({
  numKvHeads,
  tpSize = 1,
  regions = 32,
  groups = 1,
  numBlocks = 1000,
}: RanksOptions): RankGeometry[] {
  const blockLengthBytes = (numKvHeads / tpSize) * BLOCK_SIZE * 512;
  return Array.from({ length: tpSize }, (_, tpRank) => ({
    tpRank,
    tpSize,
    kernelBlockSize: BLOCK_SIZE,
    physicalBlocksPerLogical: 1,
    layout: "LBHNC",
    attentionBackend: "FLASH_ATTN",
    deviceId: tpRank,
    regions: Array.from({ length: regions }, (_, region) => ({
      name: `layers.${region}`,
      baseAddress: 2 ** 32 + region * numBlocks * blockLengthBytes,
      numBlocks,
      blockLengthBytes,
      blockStrideBytes: blockLengthBytes,
      groupId: region % groups,
      memoryType: "VRAM",
    })),
  }));
}

/**
 * How the block ids of a request lie. `scattered`: every second id alternately from both ends, so
 * that no descriptors can be merged.
 */
export const ORDERS = ["one run", "scattered"] as const;

export function idsOf(count: number, order: (typeof ORDERS)[number], from: number): number[] {
  return Array.from({ length: count }, (_, i) =>
    order === "one run" ? from + i : from + 2 * (i % 2 === 0 ? i >> 1 : count - 1 - (i >> 1)),
  );
}
