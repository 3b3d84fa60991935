import type { KvCacheKind } from "@kv/interface";
import { unsupported } from "../errors.js";
import type { GroupExtent } from "../kinds/cache-kind.js";
import { cacheKind } from "../kinds/registry.js";
import { type BlockParts, type Cuts, partsOfBlocks } from "./attention-pieces.js";
import { headsInBlock, headsOfGroup, kernelTokens } from "./region-heads.js";
import type { PairContext, RegionPiece } from "./segments.js";

/** The part of a group's plan that is the same for all requests. */
export interface GroupPlan {
  /** Kind of the group. */
  readonly kind: KvCacheKind;
  /** The part of a sequence that a list of the group's blocks holds. */
  readonly extent: GroupExtent;
  /** Unit in which descriptors count the group's blocks. */
  readonly unit: "kernel-block" | "logical-block";
  /** Tokens in a logical local block. The groups of one model may differ. */
  readonly localBlockTokens: number;
  /** Tokens in a logical remote block. */
  readonly remoteBlockTokens: number;
  /** Tokens of one descriptor. Both sides' blocks hold whole multiples of it. */
  readonly partTokens: number;
  /** Descriptors of a local block, in `unit`s. */
  readonly localParts: number;
  /** Descriptors of a remote block, in `unit`s. */
  readonly remoteParts: number;
  /** `unit`s in a logical local block: kernel blocks, or 1 for a state. */
  readonly localPerLogical: number;
  /** `unit`s in a logical remote block. */
  readonly remotePerLogical: number;
  /** Indices of the segments that hold the group's blocks. */
  readonly segments: readonly number[];
  /**
   * KV heads in a local kernel block, where the group shares regions with a group of more heads.
   * @default headsOfRegion
   */
  readonly sharedHeads?: number | undefined;
}

/**
 * The plans of all groups.
 *
 * @throws `KV_PLAN_UNSUPPORTED` for groups whose blocks cannot be cut as the others are.
 */
export function groupPlans({
  context,
  pieces,
  parts,
  cuts,
}: {
  context: PairContext;
  pieces: readonly RegionPiece[];
  /** The fewest parts into which both sides' kernel blocks divide; one ratio serves all groups. */
  parts: BlockParts;
  cuts: Cuts;
}): readonly GroupPlan[] {
  const { local, remote, model } = context;
  return Object.freeze(
    model.groups.map((name, group): GroupPlan => {
      const kind = cacheKind(name);
      const isState = kind.sharding === "state";
      const tokens = kernelTokens(local, group);
      const remoteTokens = (tokens * parts.remoteParts) / parts.localParts;
      const own = partsOfBlocks(cuts, { local: tokens, remote: remoteTokens });
      if (kind.extent === "whole" && (own.localParts !== 1 || own.remoteParts !== 1)) {
        throw unsupported(
          `blocks of group ${group} (${name}) hold no tokens, so they cannot be cut`,
          local.kernelBlockSize,
          remote.kernelBlockSize,
          "use equal kernel block sizes",
        );
      }
      if (
        kind.extent === "whole" &&
        local.physicalBlocksPerLogical !== remote.physicalBlocksPerLogical
      ) {
        throw unsupported(
          `a block of group ${group} (${name}) is one piece of scratch, and has different numbers of kernel blocks`,
          local.physicalBlocksPerLogical,
          remote.physicalBlocksPerLogical,
          "use equal numbers of kernel blocks in a logical one (block size, kernel block size)",
        );
      }
      const theirs =
        remote.groupBlockTokens === undefined ? undefined : kernelTokens(remote, group);
      if (theirs !== undefined && theirs !== remoteTokens && !isState) {
        throw unsupported(
          `group ${group} (${name}): kernel blocks do not hold tokens in the ratio of the engine's kernel blocks`,
          `${tokens} tokens of ${local.kernelBlockSize}`,
          `${theirs} tokens of ${remote.kernelBlockSize}`,
          "use equal TP and block sizes: then both engines give a group the same tokens per block",
        );
      }
      if (tokens % parts.localParts !== 0) {
        throw unsupported(
          `group ${group}: kernel blocks of ${tokens} tokens do not divide into the ${parts.localParts} parts of the engine's kernel blocks`,
          local.kernelBlockSize,
          remote.kernelBlockSize,
        );
      }
      const sharedHeads = isState ? undefined : headsBesideOthers(context, pieces, group);
      const mine = isState ? { localParts: 1, remoteParts: 1 } : own;
      return Object.freeze({
        kind: name,
        extent: kind.extent,
        unit: isState ? "logical-block" : "kernel-block",
        localBlockTokens: tokens * local.physicalBlocksPerLogical,
        remoteBlockTokens: remoteTokens * remote.physicalBlocksPerLogical,
        partTokens: tokens / own.localParts,
        localParts: mine.localParts,
        remoteParts: mine.remoteParts,
        localPerLogical: isState ? 1 : local.physicalBlocksPerLogical,
        remotePerLogical: isState ? 1 : remote.physicalBlocksPerLogical,
        segments: Object.freeze(
          [...pieces.keys()].filter((index) =>
            (pieces[index] as RegionPiece).groups.includes(group),
          ),
        ),
        ...(sharedHeads === undefined ? {} : { sharedHeads }),
      });
    }),
  );
}

/** A group's KV heads in a local block, where it shares a region with groups of more heads. */
function headsBesideOthers(
  { local, model }: PairContext,
  pieces: readonly RegionPiece[],
  group: number,
): number | undefined {
  for (const { pair, groups } of pieces) {
    if (!groups.includes(group)) continue;
    const own = headsOfGroup(pair.region, group, model);
    if (own !== pair.heads) return headsInBlock(local, own);
  }
  return undefined;
}
