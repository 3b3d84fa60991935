import { describe, expect, test } from "vitest";
import type { GroupPlan } from "../engine/group-plans.js";
import type { GroupExtent } from "../kinds/cache-kind.js";
import { refusal } from "../refused.test-support.js";
import { type GroupBlocks, pairBlocks, partsPerLogical } from "./pair-blocks.js";

const PART_TOKENS = 16;

interface Shape {
  readonly extent?: GroupExtent;
  /** Parts of a kernel block, and kernel blocks in a logical one. */
  readonly local?: readonly [parts: number, perLogical: number];
  readonly remote?: readonly [parts: number, perLogical: number];
}

const groupPlan = ({ extent = "sequence", local = [1, 1], remote = [1, 1] }: Shape): GroupPlan => ({
  kind: "full",
  extent,
  unit: "kernel-block",
  segments: [0],
  partTokens: PART_TOKENS,
  localParts: local[0],
  localPerLogical: local[1],
  localBlockTokens: local[0] * local[1] * PART_TOKENS,
  remoteParts: remote[0],
  remotePerLogical: remote[1],
  remoteBlockTokens: remote[0] * remote[1] * PART_TOKENS,
});

type Given = { local: number; remote: number; tokens?: number; computed?: number };

const ids = (count: number) => Array.from({ length: count }, (_, id) => id);
const blocks = ({ local, remote, tokens, computed }: Given): GroupBlocks => ({
  group: 0,
  localIds: ids(local),
  remoteIds: ids(remote),
  numTokens: tokens,
  computedBlocks: computed,
});
const pair = (shape: Shape, given: Given) => {
  const found = pairBlocks(groupPlan(shape), blocks(given));
  return [found.localStart, found.remoteStart, found.count, found.validTokens];
};
const refused = (shape: Shape, given: Given) => {
  const { code, message, details } = refusal(() => pair(shape, given));
  expect(code).toBe("KV_BLOCKS_MISMATCH");
  return { message, details };
};

/** A local block holds two remote blocks. */
const LARGER: Shape = { local: [2, 1], remote: [1, 1] };
test("parts of a logical block are those of its kernel blocks", () => {
  expect(partsPerLogical(groupPlan({ local: [2, 3], remote: [5, 2] }))).toEqual({
    localPer: 6,
    remotePer: 10,
  });
});

// With numTokens, ../../test/prove/proof.test.ts moves the bytes of random lists.
describe("a sequence", () => {
  test.each([
    ["computed blocks give the start", {}, { local: 2, remote: 4, computed: 1 }, [0, 1, 2, 32]],
    ["no block is computed", {}, { local: 4, remote: 4, computed: 0 }, [0, 0, 4, 64]],
    ["the remote's blocks are just full", {}, { local: 4, remote: 4, tokens: 64 }, [0, 0, 4, 64]],
    ["nothing is known: both end at one block", {}, { local: 1, remote: 3 }, [0, 2, 1, 16]],
    ["nothing is known of equal lists", {}, { local: 3, remote: 3 }, [0, 0, 3, 48]],
    ["larger local blocks, the last half full", LARGER, { local: 2, remote: 3 }, [0, 0, 3, 48]],
    ["larger local blocks, all full", LARGER, { local: 2, remote: 4 }, [0, 0, 4, 64]],
    [
      "more remote blocks than the tokens fill",
      LARGER,
      { local: 2, remote: 5, tokens: 48, computed: 0 },
      [0, 0, 3, 48],
    ],
    [
      "logical blocks of equal size, nothing is known",
      { local: [1, 2], remote: [1, 2] },
      { local: 1, remote: 3 },
      [0, 4, 2, 32],
    ],
  ] as const)("%s", (_, shape, given, expected) => {
    expect(pair(shape, given)).toEqual(expected);
  });

  test("is refused when it has more tokens than the remote's blocks hold", () => {
    expect(refused({}, { local: 1, remote: 4, tokens: 65 })).toEqual({
      message:
        "group 0: the remote's 4 blocks hold 64 tokens at most, fewer than the 65 it announced",
      details: { group: 0, remoteBlocks: 4, numTokens: 65 },
    });
  });

  test.each([
    [
      "there is one local block more than the remote has",
      {},
      { local: 4, remote: 4, computed: 1 },
      "do not reach that far",
    ],
    [
      "the remote has none of the local blocks",
      {},
      { local: 1, remote: 4, computed: 4 },
      "do not reach that far",
    ],
    [
      "there is one larger local block too many",
      LARGER,
      { local: 3, remote: 4, computed: 0 },
      "do not reach that far",
    ],
    [
      "there are more local blocks and the end is unknown",
      {},
      { local: 3, remote: 2 },
      "the place of the local blocks in the remote list is ambiguous",
    ],
    [
      "there are fewer local parts and the end is unknown",
      LARGER,
      { local: 1, remote: 3 },
      "the place of the local blocks in the remote list is ambiguous",
    ],
    [
      "there are more local blocks than the tokens fill",
      {},
      { local: 4, remote: 4, tokens: 33 },
      "the place of the local blocks in the remote list is ambiguous",
    ],
  ] as const)("is refused where %s", (_, shape, given, message) => {
    expect(refused(shape, given).message).toMatch(message);
  });

  test("a refusal reports the known counts", () => {
    expect(refused({}, { local: 4, remote: 4, computed: 1 })).toEqual({
      message:
        "group 0: 4 local blocks of 16 tokens are to be filled after 1 computed ones, and the remote's 4 blocks of 16 tokens do not reach that far",
      details: { group: 0, localBlocks: 4, remoteBlocks: 4, computedBlocks: 1 },
    });
    expect(refused(LARGER, { local: 1, remote: 3 })).toEqual({
      message:
        "group 0: with 1 local and 3 remote blocks the place of the local blocks in the remote list is ambiguous (tokens: unknown)",
      details: { group: 0, localBlocks: 1, remoteBlocks: 3, numTokens: null },
    });
    expect(refused({}, { local: 4, remote: 4, tokens: 33 }).details).toMatchObject({
      numTokens: 33,
    });
  });
});

describe("a window", () => {
  const window: Shape = { extent: "window" };
  const larger: Shape = { ...LARGER, extent: "window" };
  test.each([
    ["with an unknown end", window, { local: 2, remote: 3 }, [0, 1, 2, 32]],
    ["with an unknown end and fewer remote blocks", window, { local: 3, remote: 2 }, [1, 0, 2, 48]],
  ] as const)("%s", (_, shape, given, expected) => {
    expect(pair(shape, given)).toEqual(expected);
  });

  test.each([
    [
      "block sizes differ and the end is unknown",
      larger,
      { local: 3, remote: 3 },
      "in the remote list is ambiguous",
    ],
    [
      "the remote has more blocks than tokens",
      window,
      { local: 2, remote: 3, tokens: 20 },
      "in the remote list is ambiguous",
    ],
    [
      "the remote has no block",
      window,
      { local: 1, remote: 0, tokens: 16 },
      "do not reach that far",
    ],
  ] as const)("is refused where %s", (_, shape, given, message) => {
    expect(refused(shape, given).message).toMatch(message);
  });
});

describe("blocks without tokens", () => {
  const state: Shape = { extent: "state" };
  const whole: Shape = { extent: "whole", local: [1, 3], remote: [1, 3] };
  test.each([
    ["pairs the last remote state", state, { local: 1, remote: 3 }, [0, 2, 1, undefined]],
    [
      "one more local block for a computed state",
      state,
      { local: 2, remote: 1 },
      [0, 0, 1, undefined],
    ],
    ["scratch with all its kernel blocks", whole, { local: 2, remote: 3 }, [0, 3, 6, undefined]],
  ] as const)("%s", (_, shape, given, expected) => {
    expect(pair(shape as Shape, given)).toEqual(expected);
  });

  test.each([
    [
      state,
      { local: 3, remote: 1 },
      "group 0: 3 local blocks of state cannot be filled from 1 remote ones",
    ],
    [
      state,
      { local: 1, remote: 0 },
      "group 0: 1 local blocks of state cannot be filled from 0 remote ones",
    ],
    [
      whole,
      { local: 2, remote: 1 },
      "group 0: 2 local blocks of scratch cannot be filled from 1 remote ones",
    ],
  ])("refuses more local blocks than can be filled: %j %j", (shape, given, message) => {
    const details = { group: 0, localBlocks: given.local, remoteBlocks: given.remote };
    expect(refused(shape, given)).toEqual({ message, details });
  });
});
