import { describe, expect, test } from "vitest";
import type { Instance } from "../instances/instance.js";
import { BlockIndex, type StoredBlocks } from "./block-index.js";
import { BlockTree } from "./block-tree.js";

const FULL = { index: 0, needs: "all" } as const;
const stored = (
  hashes: readonly string[],
  tokens: readonly number[],
  more: Partial<StoredBlocks> = {},
): StoredBlocks => ({ hashes, parent: undefined, tokens, blockSize: 2, group: FULL, ...more });
const instance: Instance = { role: "prefill", url: "http://i", inFlight: 0 };
const indexOf = (maxBlocks?: number, tree = new BlockTree()) => new BlockIndex(tree, instance, maxBlocks);
const removed = (hashes: readonly string[], group = 0) => ({ hashes, group });

test("blocks are matched by parent and tokens, and at least the last token of a prompt is computed", () => {
  const index = indexOf();
  index.stored(stored(["a", "b"], [1, 2, 3, 4]));
  index.stored(stored(["c"], [5, 6], { parent: "b" }));
  expect(index.matchedTokens([1, 2, 3, 4, 5, 6, 7])).toBe(6);
  expect(index.matchedTokens([1, 2, 3, 4, 5, 6])).toBe(4);
  expect(index.matchedTokens([1, 2, 9])).toBe(2);
  expect(index.matchedTokens([3, 4, 5])).toBe(0);
  index.removed(removed(["b", "unknown"]));
  expect(index.matchedTokens([1, 2, 3, 4, 5, 6, 7])).toBe(2);
  index.cleared();
  expect([index.matchedTokens([1, 2, 3]), index.size]).toEqual([0, 0]);
});

test("a block whose parent was missed is matched as soon as the parent is stored", () => {
  const index = indexOf();
  index.stored(stored(["b"], [3, 4], { parent: "a" }));
  expect(index.matchedTokens([1, 2, 3, 4, 5])).toBe(0);
  index.stored(stored(["a"], [1, 2]));
  expect(index.matchedTokens([1, 2, 3, 4, 5])).toBe(4);
});

test("a block is gone with its last copy; a repeated announcement is no copy", () => {
  const index = indexOf();
  index.stored(stored(["a", "b"], [1, 2, 3, 4]));
  index.stored(stored(["b"], [3, 4], { parent: "a" }));
  index.stored(stored(["a", "b"], [1, 2, 3, 4]));
  index.removed(removed(["b"]));
  expect(index.matchedTokens([1, 2, 3, 4, 5])).toBe(4);
  index.removed(removed(["b"]));
  expect(index.matchedTokens([1, 2, 3, 4, 5])).toBe(2);
  index.removed(removed(["a"]));
  expect(index.size).toBe(0);
});

test("an evicted block with children keeps its number for them", () => {
  const index = indexOf();
  index.stored(stored(["a", "b"], [1, 2, 3, 4]));
  index.removed(removed(["a"]));
  // Without that, "x" would get the number of "a" and its child with it.
  index.stored(stored(["x"], [7, 8]));
  expect(index.matchedTokens([7, 8, 3, 4, 5])).toBe(2);
  index.stored(stored(["a"], [1, 2]));
  expect(index.matchedTokens([1, 2, 3, 4, 5])).toBe(4);
  index.removed(removed(["b", "a", "x"]));
  expect(index.size).toBe(0);
});

describe("several KV cache groups", () => {
  const prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9];
  const all = ["a", "b", "c", "d"];
  const tokens = prompt.slice(0, 8);

  test("a prefix is cached where each group has what it needs", () => {
    const index = indexOf();
    index.stored(stored(all, tokens));
    index.stored(stored(all, tokens, { group: { index: 1, needs: 3 } }));
    expect(index.matchedTokens(prompt)).toBe(8);
    // A window of four tokens needs the last two blocks of a prefix.
    index.removed(removed(["a", "b"], 1));
    expect(index.matchedTokens(prompt)).toBe(8);
    index.removed(removed(["d"], 1));
    expect(index.matchedTokens(prompt)).toBe(0);
    index.stored(stored(["b"], [3, 4], { parent: "a", group: { index: 1, needs: 3 } }));
    expect(index.matchedTokens(prompt)).toBe(6);
    index.removed(removed(["c"]));
    expect(index.matchedTokens(prompt)).toBe(0);
  });

  test("a group that leaves blocks out has them at their places by their hashes, not by their order", () => {
    const index = indexOf();
    index.stored(stored(["c"], tokens.slice(0, 6), { group: { index: 1, needs: "all" } }));
    index.stored(stored(all, tokens));
    expect(index.matchedTokens(prompt)).toBe(6);
    index.stored(stored(["d"], tokens.slice(2), { parent: "a", group: { index: 1, needs: "all" } }));
    expect(index.matchedTokens(prompt)).toBe(8);
  });
});

test("hashes that cover tokens after their block are told apart", () => {
  const index = indexOf();
  index.stored(stored(["a"], [1, 2], { lookahead: [[3]] }));
  index.stored(stored(["b"], [1, 2], { lookahead: [[9]] }));
  expect([index.matchedTokens([1, 2, 3]), index.matchedTokens([1, 2, 4])]).toEqual([2, 0]);
  index.removed(removed(["a"]));
  expect([index.matchedTokens([1, 2, 3]), index.matchedTokens([1, 2, 9])]).toEqual([0, 2]);
  expect(index.contradictions).toBe(0);
});

test("a publisher that lies: wrong places are counted, and memory stays within the limit", () => {
  const index = indexOf(100);
  index.stored(stored(["a"], [1, 2], { parent: "a" }));
  index.stored(stored(["b"], [3, 4]));
  index.stored(stored(["b"], [5, 6]));
  index.stored(stored(["c"], [3, 4]));
  expect(index.contradictions).toBe(3);
  expect(index.matchedTokens([3, 4, 5])).toBe(2);
  for (let at = 0; at < 1000; at += 1) index.stored(stored([`x${at}`], [at, at], { parent: `p${at}` }));
  expect([index.size <= 100, index.refused > 0]).toEqual([true, true]);
  for (let group = 1; group < 1000; group += 1)
    index.stored(stored(["x"], [9, 9], { group: { index: group, needs: "all" } }));
  // A group that has nothing keeps all from being a match.
  expect(index.matchedTokens([3, 4, 5])).toBe(0);
  index.cleared();
  index.stored(stored(["b"], [3, 4]));
  expect(index.matchedTokens([3, 4, 5])).toBe(2);
});
