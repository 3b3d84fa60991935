import type { KvCacheKind } from "@kv/interface";
import {
  type BuildPlanOptions,
  buildEngineTransferPlan,
  type EngineTransferPlan,
} from "./engine/engine-plan.js";
import type { RankGeometry, RegionGeometry } from "./geometry/rank-geometry.js";

/** A sound rank of a model with 4 KV heads of 8 bytes per token and two layers. */
export function sampleRank(
  change: Partial<RankGeometry> & { blockLengthBytes?: number } = {},
): RankGeometry {
  const { blockLengthBytes, ...rest } = change;
  const { tpSize = 1, kernelBlockSize = 16 } = change;
  const lengthBytes = blockLengthBytes ?? Math.max(1, Math.floor(4 / tpSize)) * kernelBlockSize * 8;
  return {
    tpRank: 0,
    tpSize,
    kernelBlockSize,
    physicalBlocksPerLogical: 1,
    layout: "LBHNC",
    attentionBackend: "FLASH_ATTN",
    deviceId: 0,
    regions: ["layer.0", "layer.1"].map((name, index) => ({
      name,
      baseAddress: 4096 + index * 2 ** 20,
      numBlocks: 10,
      blockLengthBytes: lengthBytes,
      blockStrideBytes: lengthBytes,
      groupId: 0,
      memoryType: "DRAM",
    })),
    ...rest,
  };
}

/** A rank whose regions have these changes. */
export function withRegions(
  rank: RankGeometry,
  change: (region: RegionGeometry, index: number) => Partial<RegionGeometry>,
): RankGeometry {
  const regions = rank.regions.map((region, index) => ({ ...region, ...change(region, index) }));
  return { ...rank, regions };
}

/** A rank with each region in a group of its own. */
export const ownGroups = (rank: RankGeometry): RankGeometry =>
  withRegions(rank, (_, groupId) => ({ groupId }));

export function samplePair(
  local = sampleRank(),
  remote = sampleRank(),
  groups: readonly KvCacheKind[] = ["full"],
): BuildPlanOptions {
  return { local, remotes: [remote], numKvHeads: 4, groups };
}

/** The plan of a sample pair, whose ranks have these changes. */
export function samplePlan(
  local: Parameters<typeof sampleRank>[0] = {},
  remote: Parameters<typeof sampleRank>[0] = {},
  options: Partial<BuildPlanOptions> = {},
): EngineTransferPlan {
  const pair = samplePair(sampleRank(local), sampleRank(remote));
  return buildEngineTransferPlan({ ...pair, ...options });
}
