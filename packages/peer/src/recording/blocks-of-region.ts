import type { BlockIds } from "@kv/interface";
import type { AgentMetadata } from "@kv/protocol";

/** A region that several groups share. */
const SHARED = -1;

/** The kernel blocks of a request in a region, in the order in which a recording holds them. */
export function blocksOfRegion(
  metadata: AgentMetadata,
  region: number,
  blockIds: BlockIds,
): readonly number[] {
  const group = metadata.regionGroupIds?.[region] ?? 0;
  // Where all regions name one group, every group's blocks are in every region.
  const all = group === SHARED || new Set(metadata.regionGroupIds ?? []).size <= 1;
  const logical = all ? blockIds.flat() : (blockIds[group] ?? []);
  const kernels = metadata.physicalBlocksPerLogical;
  if (kernels === 1) return logical;
  return logical.flatMap((id) => Array.from({ length: kernels }, (_, kernel) => id * kernels + kernel));
}
