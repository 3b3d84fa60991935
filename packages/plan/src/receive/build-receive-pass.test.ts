import { expect, test } from "vitest";
import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { GroupPlan } from "../engine/group-plans.js";
import type { PairedBlocks } from "../request/pair-blocks.js";
import { samplePlan } from "../sample-pair.test-support.js";
import { buildReceivePass } from "./build-receive-pass.js";

const sample = samplePlan();

/** Group 1 has kernel blocks of 16 tokens. */
function planOf(
  change: Partial<EngineTransferPlan>,
  group: Partial<GroupPlan> = {},
): EngineTransferPlan {
  const [first] = sample.groupPlans as [GroupPlan];
  const own = { ...first, partTokens: 16, localParts: 1, localPerLogical: 1, ...group };
  return { ...sample, form: "copy", uncovered: "zeroed", ...change, groupPlans: [first, own] };
}
const pairs = (
  localStart: number,
  count: number,
  validTokens: number | undefined,
): PairedBlocks => ({
  localStart,
  remoteStart: 0,
  count,
  validTokens,
});
/**
 * As plain numbers: permuted blocks, zeroed blocks, the block that is covered in part with its
 * first uncovered token, and the one in which the window begins.
 */
function passOf(plan: EngineTransferPlan, ids: readonly number[], paired: PairedBlocks) {
  const pass = buildReceivePass(plan, 1, ids, paired);
  if (pass === undefined) return undefined;
  expect(pass.group).toBe(1);
  const { leadingBlock: leading, partialBlock: partial } = pass;
  return [
    [...pass.permuteBlockIds],
    [...pass.zeroBlockIds],
    partial === undefined ? "partialBlock" in pass : [partial.blockId, partial.fromToken],
    ...(leading === undefined ? [] : [[leading.blockId, leading.untilToken]]),
  ];
}

const COPY = planOf({});
const TWO_KERNEL_BLOCKS = planOf({}, { localPerLogical: 2 });
const HALVES = { partTokens: 8, localParts: 2 };
const PERMUTE = planOf({ form: "permute" }, HALVES);
const MASKED = planOf({ form: "permute", uncovered: "masked" }, HALVES);

test.each<[string, ReturnType<typeof passOf>, EngineTransferPlan, readonly number[], PairedBlocks]>(
  [
    ["blocks that are full", undefined, COPY, [6, 7], pairs(0, 2, 32)],
    ["a state, or scratch", undefined, PERMUTE, [6, 7], pairs(0, 2, undefined)],
    ["the tail of the last block", [[], [], [7, 8]], COPY, [6, 7], pairs(0, 2, 24)],
    ["one token in the last block", [[], [], [7, 1]], COPY, [6, 7], pairs(0, 2, 17)],
    ["a block without transferred tokens", [[], [7], false], COPY, [6, 7], pairs(0, 1, 16)],
    [
      "several blocks without transferred tokens, after a partial block",
      [[], [9, 4], [7, 3]],
      COPY,
      [6, 7, 9, 4],
      pairs(0, 2, 19),
    ],
    // Logical blocks 6 and 7 are the kernel blocks 12 to 15; 40 tokens are two and a half.
    [
      "kernel blocks of a logical one",
      [[], [15], [14, 8]],
      TWO_KERNEL_BLOCKS,
      [6, 7],
      pairs(0, 3, 40),
    ],
    [
      "kernel blocks without a partial block",
      [[], [13, 14, 15], false],
      TWO_KERNEL_BLOCKS,
      [6, 7],
      pairs(0, 1, 16),
    ],
    ["an engine that masks", undefined, planOf({ uncovered: "masked" }), [6, 7], pairs(0, 1, 11)],
    // Five parts of 8 tokens: the third block is reached by its first part.
    [
      "a permute pass over the blocks with transferred tokens",
      [[6, 7, 9], [4], [9, 8]],
      PERMUTE,
      [6, 7, 9, 4],
      pairs(0, 5, 40),
    ],
    ["a permute pass over full blocks", [[6, 7], [], false], PERMUTE, [6, 7], pairs(0, 4, 32)],
    ["a permute pass for an engine that masks", [[6], [], false], MASKED, [6, 7], pairs(0, 1, 7)],
    // The remote kept less of the window than there is room for: the block before it holds another
    // request's bytes.
    ["before the window's begin", [[], [6], false], COPY, [6, 7], pairs(1, 1, 32)],
    [
      "before the window, a tail, and behind it",
      [
        [7, 9],
        [6, 4],
        [9, 8],
      ],
      PERMUTE,
      [6, 7, 9, 4],
      pairs(2, 3, 40),
    ],
    // Parts 1 to 3: the first block is reached by its second part alone, and so is not before the
    // window.
    [
      "a window that begins within a block",
      [[6, 7], [9], false, [6, 8]],
      PERMUTE,
      [6, 7, 9],
      pairs(1, 3, 32),
    ],
    [
      "a window that begins within the second block",
      [[7, 9], [6], false, [7, 8]],
      PERMUTE,
      [6, 7, 9],
      pairs(3, 3, 48),
    ],
    [
      "a window that begins and ends within one block",
      [[6], [], [6, 12], [6, 8]],
      PERMUTE,
      [6],
      pairs(1, 1, 12),
    ],
    [
      "a window that begins within a block, for an engine that masks",
      [[6, 7], [], false],
      MASKED,
      [6, 7],
      pairs(1, 3, 32),
    ],
  ],
)("%s", (_what, expected, plan, ids, paired) => {
  expect(passOf(plan, ids, paired)).toEqual(expected);
});
