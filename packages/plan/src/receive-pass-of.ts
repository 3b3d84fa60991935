import type { EngineTransferPlan } from "./engine-plan-types.js";
import type { PairedBlocks } from "./pair-blocks.js";
import type { ReceivePassGroup } from "./request-plan-types.js";

const NONE = new Int32Array(0);

/** The receive pass of one group of a request; undefined when its blocks are right as they land. */
export function receivePassOf(
  plan: EngineTransferPlan,
  group: number,
  localIds: readonly number[],
  pairs: PairedBlocks,
): ReceivePassGroup | undefined {
  const { blockSizeRatio, local } = plan;
  const perLogical = local.physicalBlocksPerLogical;
  const kernelBlock = (index: number) =>
    (localIds[Math.floor(index / perLogical)] ?? 0) * perLogical + (index % perLogical);
  const kernelBlocks = localIds.length * perLogical;
  const touched = Math.ceil(pairs.localParts.length / blockSizeRatio);
  const permuteBlockIds =
    plan.form === "permute" ? Int32Array.from({ length: touched }, (_, i) => kernelBlock(i)) : NONE;

  let zeroBlockIds = NONE;
  let partialBlock: ReceivePassGroup["partialBlock"];
  if (plan.uncovered === "zeroed") {
    const whole = Math.floor(pairs.validTokens / local.kernelBlockSize);
    const fromToken = pairs.validTokens % local.kernelBlockSize;
    if (fromToken > 0) partialBlock = { blockId: kernelBlock(whole), fromToken };
    const firstZero = whole + (fromToken > 0 ? 1 : 0);
    zeroBlockIds = Int32Array.from({ length: kernelBlocks - firstZero }, (_, i) =>
      kernelBlock(firstZero + i),
    );
  }
  if (permuteBlockIds.length === 0 && zeroBlockIds.length === 0 && partialBlock === undefined)
    return undefined;
  return { group, permuteBlockIds, zeroBlockIds, ...(partialBlock === undefined ? {} : { partialBlock }) };
}
