import type { BlockIds } from "@kv/interface";
import type { AgentMetadata } from "@kv/protocol";

/** `regionGroupIds` of a region that every KV cache group shares. */
const SHARED_REGION = -1;

/** The KV cache groups whose blocks lie in a region, of `numGroups`. */
export function groupsOfRegion(
  metadata: AgentMetadata,
  region: number,
  numGroups: number,
): readonly number[] {
  const groupIds = metadata.regionGroupIds ?? [];
  const group = groupIds[region] ?? 0;
  // When all regions name the same group, the blocks of every group lie in every region.
  const holdsAllGroups = group === SHARED_REGION || new Set(groupIds).size <= 1;
  return holdsAllGroups ? Array.from({ length: numGroups }, (_, each) => each) : [group];
}

/**
 * The kernel blocks of a request in one region, in the order in which a recording stores them:
 * group after group.
 */
export function kernelBlocksOfRegion(
  metadata: AgentMetadata,
  region: number,
  blockIds: BlockIds,
): readonly number[] {
  const logical = groupsOfRegion(metadata, region, blockIds.length).flatMap(
    (group) => blockIds[group] ?? [],
  );
  const kernels = metadata.physicalBlocksPerLogical;
  if (kernels === 1) return logical;
  return logical.flatMap((id) =>
    Array.from({ length: kernels }, (_, kernel) => id * kernels + kernel),
  );
}
