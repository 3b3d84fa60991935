import { type BlockIds, type KvCacheKind, KvError } from "@kv/interface";

/**
 * vLLM 0.33's `_logical_to_kernel_block_ids`: each logical block has `physicalPerLogical`
 * consecutive kernel blocks. State-space blocks are never divided.
 */
export function logicalToKernelBlockIds(
  groups: readonly KvCacheKind[],
  blockIds: BlockIds,
  physicalPerLogical: number,
): BlockIds {
  requireGroups(groups, blockIds);
  return blockIds.map((ids, group) =>
    groups[group] === "mamba" ? ids : expandBlocks(ids, physicalPerLogical),
  );
}

function expandBlocks(ids: readonly number[], factor: number): readonly number[] {
  if (factor === 1) return ids;
  const expanded: number[] = [];
  for (const id of ids) for (let part = 0; part < factor; part++) expanded.push(id * factor + part);
  return expanded;
}

/**
 * vLLM 0.33's `_map_block_ids_for_block_size_ratio`: local blocks in parts of the remote's size,
 * paired from the front. Parts beyond the remote's list are cut.
 */
export function mapBlockIdsForBlockSizeRatio(
  groups: readonly KvCacheKind[],
  localBlockIds: BlockIds,
  remoteBlockIds: BlockIds,
  blockSizeRatio: number,
): { localBlockIds: BlockIds; remoteBlockIds: BlockIds } {
  requireGroups(groups, remoteBlockIds);
  if (localBlockIds.length > 0) requireGroups(groups, localBlockIds);
  const mapped = remoteBlockIds.map((remote, group) => {
    const local = localBlockIds[group] ?? [];
    return groups[group] === "mamba"
      ? local
      : expandBlocks(local, blockSizeRatio).slice(0, remote.length);
  });
  return { localBlockIds: mapped.some((ids) => ids.length > 0) ? mapped : [], remoteBlockIds };
}

interface PrefixCachingOptions {
  readonly groups: readonly KvCacheKind[];
  readonly decodeBlockIds: BlockIds;
  readonly prefillBlockIds: BlockIds;
  readonly decodePhysicalPerLogical: number;
  readonly prefillPhysicalPerLogical: number;
}

/**
 * vLLM 0.33's `_apply_prefix_caching`: cuts the lists to the blocks that the decode side lacks, the
 * end of the sequence. Nothing is transferred of a group without decode blocks.
 */
export function applyPrefixCaching(options: PrefixCachingOptions): {
  decodeBlockIds: BlockIds;
  prefillBlockIds: BlockIds;
} {
  const { groups, decodeBlockIds, prefillBlockIds } = options;
  requireGroups(groups, decodeBlockIds);
  requireGroups(groups, prefillBlockIds);
  const hybrid = groups.includes("mamba");
  const equalPhysical = options.decodePhysicalPerLogical === options.prefillPhysicalPerLogical;
  const decode: (readonly number[])[] = [];
  const prefill: (readonly number[])[] = [];
  for (const [group, kind] of groups.entries()) {
    const [wanted, held] = [decodeBlockIds[group], prefillBlockIds[group]] as [
      readonly number[],
      readonly number[],
    ];
    const excess = wanted.length - held.length;
    if (excess < 0 && (!hybrid || kind === "mamba" || equalPhysical)) {
      decode.push(wanted);
      // With no wanted block this keeps the whole list.
      prefill.push(held.slice(-wanted.length));
      continue;
    }
    // Allocation rounds up to logical blocks, and a hybrid's decode side recomputes the last
    // position.
    const allowance = !hybrid
      ? 0
      : kind === "mamba"
        ? 1
        : options.decodePhysicalPerLogical + options.prefillPhysicalPerLogical;
    if (Math.abs(excess) > allowance)
      throw new KvError(
        "KV_BLOCKS_MISMATCH",
        `group ${group} (${kind}): decode wants ${wanted.length} blocks and prefill holds ${held.length}; they may differ by ${allowance} at most`,
      );
    const common = Math.min(wanted.length, held.length);
    decode.push(wanted.slice(0, common));
    prefill.push(held.slice(0, common));
  }
  return { decodeBlockIds: decode, prefillBlockIds: prefill };
}

function requireGroups(groups: readonly KvCacheKind[], blockIds: BlockIds): void {
  if (blockIds.length === groups.length) return;
  throw new KvError(
    "KV_BLOCKS_MISMATCH",
    `block ids of ${blockIds.length} KV cache groups given, the engine has ${groups.length}`,
  );
}
