import type { KvCacheKind } from "@kv/interface";
import { unsupported } from "../errors.js";
import type { GroupExtent } from "../kinds/cache-kind.js";
import {
  type BlockParts,
  type Cuts,
  type PairContext,
  partsOfBlocks,
  type RegionPiece,
} from "./pieces.js";
import { headsInBlock, headsOfGroup, kernelTokens, kindOf } from "./region-heads.js";

/** What is the same for all requests about a group. */
export interface GroupPlan {
  readonly kind: KvCacheKind;
  readonly extent: GroupExtent;
  readonly unit: "kernel-block" | "logical-block";
  /** Groups may differ. */
  readonly localBlockTokens: number;
  readonly remoteBlockTokens: number;
  /** Tokens of one descriptor, which divides both sides' blocks. */
  readonly partTokens: number;
  /** Descriptors of a local block, in `unit`s. */
  readonly localParts: number;
  readonly remoteParts: number;
  /** Kernel blocks in a logical block, or 1 for a state. */
  readonly localPerLogical: number;
  readonly remotePerLogical: number;
  readonly segments: readonly number[];
  /**
   * Where a group of more heads shares its regions: KV heads in a local kernel block.
   * @default headsOfRegion
   */
  readonly sharedHeads?: number | undefined;
}

/** @throws `KV_PLAN_UNSUPPORTED` for groups whose blocks cannot be cut as the others are. */
export function groupPlans({
  context,
  pieces,
  parts,
  cuts,
}: {
  context: PairContext;
  pieces: readonly RegionPiece[];
  parts: BlockParts;
  cuts: Cuts;
}): readonly GroupPlan[] {
  const { local, remote, model } = context;
  const [kernelBlocks, remoteKernelBlocks] = [local, remote].map(
    ({ physicalBlocksPerLogical }) => physicalBlocksPerLogical,
  ) as [number, number];
  return Object.freeze(
    model.groups.map((name, group): GroupPlan => {
      const { extent, sharding } = kindOf(model, group);
      const isState = sharding === "state";
      const tokens = kernelTokens(local, group);
      const remoteTokens = (tokens * parts.remoteParts) / parts.localParts;
      const own = partsOfBlocks(cuts, tokens, remoteTokens);
      if (extent === "whole" && (own.localParts !== 1 || own.remoteParts !== 1)) {
        throw unsupported(
          `blocks of group ${group} (${name}) hold no tokens, so they cannot be cut`,
          local.kernelBlockSize,
          remote.kernelBlockSize,
          "use equal kernel block sizes",
        );
      }
      if (extent === "whole" && kernelBlocks !== remoteKernelBlocks) {
        throw unsupported(
          `a block of group ${group} (${name}) is one piece of scratch, and has different numbers of kernel blocks`,
          kernelBlocks,
          remoteKernelBlocks,
          "use equal numbers of kernel blocks in a logical one (block size, kernel block size)",
        );
      }
      const theirs = remote.groupBlockTokens && kernelTokens(remote, group);
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
      const segments = [...pieces.entries()].flatMap(([index, { groups }]) =>
        groups.includes(group) ? [index] : [],
      );
      const sharedHeads = isState ? undefined : headsBesideOthers(context, pieces, group);
      return Object.freeze({
        kind: name,
        extent,
        unit: isState ? "logical-block" : "kernel-block",
        localBlockTokens: tokens * kernelBlocks,
        remoteBlockTokens: remoteTokens * remoteKernelBlocks,
        partTokens: tokens / own.localParts,
        localParts: isState ? 1 : own.localParts,
        remoteParts: isState ? 1 : own.remoteParts,
        localPerLogical: isState ? 1 : kernelBlocks,
        remotePerLogical: isState ? 1 : remoteKernelBlocks,
        segments: Object.freeze(segments),
        ...(sharedHeads === undefined ? {} : { sharedHeads }),
      });
    }),
  );
}

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
