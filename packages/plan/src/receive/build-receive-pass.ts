import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { GroupPlan } from "../engine/group-plans.js";
import type { PairedBlocks } from "../request/pair-blocks.js";

/**
 * The changes to the local cache that `applyReceivePass` makes when all reads of a request have
 * landed, before the engine uses the blocks.
 */
export interface ReceivePass {
  /** Groups with blocks to change. */
  readonly groups: readonly ReceivePassGroup[];
}

/** Local kernel blocks of one group that the receive pass changes. */
export interface ReceivePassGroup {
  /** Index of the KV cache group. */
  readonly group: number;
  /** Blocks whose heads and tokens are put in order. */
  readonly permuteBlockIds: Int32Array;
  /** The block in which the remote's window begins: tokens before `untilToken` are zeroed. */
  readonly leadingBlock?: { readonly blockId: number; readonly untilToken: number } | undefined;
  /** The block that the transfers cover in part: tokens from `fromToken` on are zeroed. */
  readonly partialBlock?: { readonly blockId: number; readonly fromToken: number } | undefined;
  /** Blocks that no transfer covers; zeroed whole. */
  readonly zeroBlockIds: Int32Array;
}

const NONE = new Int32Array(0);

/** The receive pass of one group of a request; undefined when no block needs a change. */
export function buildReceivePass(
  plan: EngineTransferPlan,
  group: number,
  localIds: readonly number[],
  pairs: PairedBlocks,
): ReceivePassGroup | undefined {
  const { validTokens } = pairs;
  // A state or a scratch block has no tokens to order or zero.
  if (validTokens === undefined) return undefined;
  const {
    localPerLogical: perLogical,
    localParts,
    partTokens,
  } = plan.groupPlans[group] as GroupPlan;
  const kernelTokens = partTokens * localParts;
  const kernelBlock = (index: number) =>
    (localIds[Math.floor(index / perLogical)] ?? 0) * perLogical + (index % perLogical);
  const kernelBlocks = localIds.length * perLogical;
  const untouched = Math.floor(pairs.localStart / localParts);
  const touched = Math.ceil((pairs.localStart + pairs.count) / localParts) - untouched;
  const permuteBlockIds =
    plan.form === "permute"
      ? Int32Array.from({ length: touched }, (_, index) => kernelBlock(untouched + index))
      : NONE;

  let zeroBlockIds = NONE;
  let leadingBlock: ReceivePassGroup["leadingBlock"];
  let partialBlock: ReceivePassGroup["partialBlock"];
  if (plan.uncovered === "zeroed") {
    const untilToken = (pairs.localStart % localParts) * partTokens;
    if (untilToken > 0) leadingBlock = { blockId: kernelBlock(untouched), untilToken };
    const whole = Math.floor(validTokens / kernelTokens);
    const fromToken = validTokens % kernelTokens;
    if (fromToken > 0) partialBlock = { blockId: kernelBlock(whole), fromToken };
    const firstZero = Math.ceil(validTokens / kernelTokens);
    if (untouched + kernelBlocks > firstZero) {
      const zero = (index: number) => (index < untouched ? index : firstZero + index - untouched);
      zeroBlockIds = Int32Array.from({ length: untouched + kernelBlocks - firstZero }, (_, index) =>
        kernelBlock(zero(index)),
      );
    }
  }
  const isEmpty = permuteBlockIds.length === 0 && zeroBlockIds.length === 0;
  if (isEmpty && leadingBlock === undefined && partialBlock === undefined) return undefined;
  return {
    group,
    permuteBlockIds,
    zeroBlockIds,
    ...(leadingBlock === undefined ? {} : { leadingBlock }),
    ...(partialBlock === undefined ? {} : { partialBlock }),
  };
}
