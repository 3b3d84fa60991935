import { type BlockIds, type KvCacheKind, KvError } from "@kv/interface";

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
