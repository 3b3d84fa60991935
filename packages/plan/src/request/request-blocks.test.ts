import { expect, test } from "vitest";
import { exchangedBlocks } from "./request-blocks.js";

const ids = (count: number, from = 0) => Array.from({ length: count }, (_, index) => from + index);

test("full attention: the sequence's blocks, without the next token's block and the computed blocks", () => {
  const config = { groups: [{ kind: "full", layerNames: [] }], blockSize: 16 };
  expect(exchangedBlocks([ids(5)], config, { numTokens: 64 })).toEqual([[0, 1, 2, 3]]);
  expect(exchangedBlocks([ids(5)], config, { numTokens: 65 })).toEqual([[0, 1, 2, 3, 4]]);
  expect(exchangedBlocks([ids(5)], config, { numTokens: 64, computedBlocks: [2] })).toEqual([
    [2, 3],
  ]);
  expect(exchangedBlocks([ids(2)], config, { numTokens: 64, dcpSize: 4 })).toEqual([[0]]);
});

test("a window: its last blocks and one more, counted in the group's own block size", () => {
  const groups = [
    { kind: "full", layerNames: [] },
    { kind: "swa", layerNames: [], slidingWindowTokens: 40, blockSize: 32 },
    { kind: "swa-mla", layerNames: [] },
  ];
  const tables = [ids(8), ids(5, 10), ids(9, 20)];
  expect(exchangedBlocks(tables, { groups, blockSize: 16 }, { numTokens: 128 })).toEqual([
    ids(8),
    [11, 12, 13],
    ids(8, 20),
  ]);
});

test("state: only the running state, without older or speculative ones", () => {
  const group = (speculativeBlocks?: number) => ({
    groups: [
      {
        kind: "mamba",
        layerNames: [],
        ...(speculativeBlocks === undefined ? {} : { speculativeBlocks }),
      },
    ],
    blockSize: 16,
  });
  expect(exchangedBlocks([[3, 9]], group(), { numTokens: 64 })).toEqual([[9]]);
  expect(exchangedBlocks([[3, 9, 10, 11]], group(2), { numTokens: 64 })).toEqual([[9]]);
  expect(exchangedBlocks([[3]], group(2), { numTokens: 64 })).toEqual([[3]]);
  expect(exchangedBlocks([[]], group(), { numTokens: 64 })).toEqual([[]]);
});

test("scratch: all blocks", () => {
  const config = { groups: [{ kind: "circular", layerNames: [] }], blockSize: 16 };
  expect(exchangedBlocks([[4, 2, 7]], config, { numTokens: 1 })).toEqual([[4, 2, 7]]);
});

test("S4.10: a partial prefix hit trims the groups of attention, and never those of states", () => {
  const config = {
    groups: ["full", "mamba", "swa"].map((kind) => ({ kind, layerNames: [] })),
    blockSize: 16,
  };
  const blocks = [[1, 2, 3, 4], [5], [6, 7, 8, 9]];
  const given = { numTokens: 60, computedBlocks: [2, 2, 2] };
  expect(exchangedBlocks(blocks, config, given)).toEqual([[3, 4], [5], [8, 9]]);
});
