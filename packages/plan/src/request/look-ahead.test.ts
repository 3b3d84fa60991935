import { describe, expect, test } from "vitest";
import { refusal } from "../refused.test-support.js";
import { samplePlan, sampleRank, withRegions } from "../sample-pair.test-support.js";
import { exchangedBlocks } from "./request-blocks.js";
import { planRequest } from "./request-plan.js";

const BLOCK = 16;
const WINDOW = 32;

interface Sides {
  /** Tokens in a block of the window's group. */
  readonly windowBlock?: number;
  readonly groups?: readonly ["full" | "swa", "swa"];
}

function planOf({ windowBlock = BLOCK, groups = ["full", "swa"] }: Sides) {
  const groupBlockTokens = [BLOCK, windowBlock];
  const side = withRegions(sampleRank({ groupBlockTokens }), (region, groupId) => {
    const bytes = groupId === 0 ? region.blockLengthBytes : 4 * windowBlock * 8;
    return { numBlocks: 20, groupId, blockLengthBytes: bytes, blockStrideBytes: bytes };
  });
  return samplePlan(side, side, { groups });
}

/**
 * Lists of a vLLM engine with blocks for `allocated` tokens: a window's are cut to a length,
 * whatever lies behind the last token.
 */
const remoteLists = (allocated: number, windowBlock: number, groups: Sides["groups"]) => {
  const positions = (tokens: number) =>
    Array.from({ length: Math.ceil(allocated / tokens) }, (_, at) => at);
  const cut = (tokens: number) => positions(tokens).slice(-(Math.ceil(WINDOW / tokens) + 1));
  return [groups?.[0] === "swa" ? cut(BLOCK) : positions(BLOCK), cut(windowBlock)];
};

/**
 * By position in the sequence: the window's local blocks that are filled, each from the remote
 * block of the same tokens or not.
 */
function filled(
  numTokens: number,
  lookAhead: number,
  { windowBlock = BLOCK, ...more }: Sides = {},
) {
  const config = {
    groups: [
      { kind: "full", layerNames: [] },
      { kind: "swa", layerNames: [], slidingWindowTokens: WINDOW, blockSize: windowBlock },
    ],
    blockSize: BLOCK,
  };
  const positions = (tokens: number) =>
    Array.from({ length: Math.ceil(numTokens / tokens) }, (_, at) => at);
  const plan = planOf({ windowBlock, ...more });
  const { reads } = planRequest(plan, {
    localBlockIds: exchangedBlocks([positions(BLOCK), positions(windowBlock)], config, {
      numTokens,
    }),
    remoteBlockIds: remoteLists(numTokens + lookAhead, windowBlock, more.groups),
    numTokens,
    localComputedBlocks: [0, 0],
  });
  const [read] = reads;
  if (read === undefined) return expect.fail("nothing is read");
  const offset = plan.localIndexing[1]?.offset ?? 0;
  return [...read.localIds].flatMap((id, index) =>
    id < offset ? [] : [[id - offset, (read.remoteIds[index] ?? 0) - offset]],
  );
}

const misfit = (attempt: () => unknown) => {
  const { code, message } = refusal(attempt);
  expect(code).toBe("KV_BLOCKS_MISMATCH");
  return message;
};
const each = (...positions: readonly number[]) => positions.map((position) => [position, position]);

describe("a window's list with look-ahead blocks behind the last token (vllm-ascend#8908)", () => {
  test.each([
    [80, 0, each(2, 3, 4)],
    [80, 1, each(3, 4)],
    [79, 3, each(3, 4)],
    [70, 3, each(2, 3, 4)],
    [20, 20, each(0, 1)],
  ])(
    "%i tokens and %i of look-ahead: each block is filled from the block of its tokens",
    (numTokens, lookAhead, expected) => {
      expect(filled(numTokens, lookAhead)).toEqual(expected);
    },
  );

  test("is refused where the list begins within the window", () => {
    // Tokens 47 to 77 are the window before token 78; the remote's list is blocks 3 to 5.
    expect(misfit(() => filled(78, 3))).toBe(
      "group 1: the remote's list of this window has 1 blocks behind the last of 78 tokens, and lacks as many at its begin: " +
        "it holds tokens from 48 on, and the window may begin at 47",
    );
    // The window reaches the first token.
    expect(misfit(() => filled(32, 17))).toContain(
      "tokens from 16 on, and the window may begin at 0",
    );
  });

  test("blocks of another size than the group's that shows them are counted in tokens, or refused", () => {
    // Blocks for 81 to 96 tokens: 2 of 64 in either case, as many as 80 tokens need.
    expect(filled(80, 1, { windowBlock: 64 })).toEqual(each(0, 1));
    // Blocks for 81 to 96 tokens: 11 or 12 of 8.
    expect(misfit(() => filled(80, 1, { windowBlock: 8 }))).toContain(
      "which of the 5 blocks of this window lie behind them is open: it has blocks for 81 to 96 tokens",
    );
  });

  test("do not show without a group of the whole sequence: both lists are taken to end at the last token, as in vLLM", () => {
    expect(filled(80, 1, { groups: ["swa", "swa"] })).toEqual([
      [2, 3],
      [3, 4],
      [4, 5],
    ]);
  });
});
