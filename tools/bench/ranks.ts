import { buildEngineTransferPlan, type EngineTransferPlan, type RankGeometry } from "@kv/plan";

export const BLOCK_SIZE = 16;

export interface RanksOptions {
  readonly numKvHeads: number;
  readonly tpSize?: number;
  readonly regions?: number;
  readonly groups?: number;
  readonly numBlocks?: number;
  /** Default: a head has 512 bytes per token, keys and values. */
  readonly blockLengthBytes?: number;
  readonly baseAddress?: number;
  readonly memoryType?: "DRAM" | "VRAM";
}

export function ranksOf(options: RanksOptions): RankGeometry[] {
  const { numKvHeads, tpSize = 1, regions = 32, groups = 1, numBlocks = 1000 } = options;
  const {
    blockLengthBytes = (numKvHeads / tpSize) * BLOCK_SIZE * 512,
    baseAddress = 2 ** 32,
    memoryType = "VRAM",
  } = options;
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
      baseAddress: baseAddress + region * numBlocks * blockLengthBytes,
      numBlocks,
      blockLengthBytes,
      blockStrideBytes: blockLengthBytes,
      groupId: region % groups,
      memoryType,
    })),
  }));
}

/** Tables are built at first use, which is in the handshake. */
export function planOf(
  local: RankGeometry | undefined,
  remotes: readonly (RankGeometry | undefined)[],
  numKvHeads: number,
  groups = 1,
): EngineTransferPlan {
  const [first, ...others] = [local, ...remotes].filter((rank) => rank !== undefined);
  if (first === undefined) throw new Error("no rank");
  const kinds = Array.from({ length: groups }, () => "full" as const);
  const plan = buildEngineTransferPlan({
    local: first,
    remotes: others,
    numKvHeads,
    groups: kinds,
  });
  for (const source of plan.sources)
    void (source.localTable.rows.length + source.remoteTable.rows.length);
  return plan;
}

/** `scattered`: every second id alternately from both ends: nothing can be merged. */
export const ORDERS = ["one run", "scattered"] as const;

export function idsOf(count: number, order: (typeof ORDERS)[number], from: number): number[] {
  return Array.from({ length: count }, (_, i) =>
    order === "one run" ? from + i : from + 2 * (i % 2 === 0 ? i >> 1 : count - 1 - (i >> 1)),
  );
}
