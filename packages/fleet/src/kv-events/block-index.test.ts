import { describe, expect, test } from "vitest";
import type { Instance } from "../instances/instance.js";
import { BlockIndex, type Steps } from "./block-index.js";
import { BlockTree } from "./block-tree.js";
import type { StoredBlocks } from "./kv-event-batch.js";

const FULL = { index: 0, needs: "all" } as const;
const stored = (
  hashes: readonly string[],
  tokens: readonly number[],
  more: Partial<StoredBlocks> = {},
): StoredBlocks => ({ hashes, parent: undefined, tokens, blockSize: 2, group: FULL, ...more });
const instance: Instance = { role: "prefill", url: "http://i", inFlight: 0 };
const indexOf = (maxBlocks?: number, tree = new BlockTree()) =>
  new BlockIndex(tree, instance, maxBlocks);
/** Runs all steps. */
const done = (steps: Steps) => void [...steps];
const removed = (hashes: readonly string[], group = 0) => ({ hashes, group });

test("blocks are matched by parent and tokens, and at least the last token of a prompt is computed", () => {
  const index = indexOf();
  done(index.stored(stored(["a", "b"], [1, 2, 3, 4])));
  done(index.stored(stored(["c"], [5, 6], { parent: "b" })));
  expect(index.matchedTokens([1, 2, 3, 4, 5, 6, 7])).toBe(6);
  expect(index.matchedTokens([1, 2, 3, 4, 5, 6])).toBe(4);
  expect(index.matchedTokens([1, 2, 9])).toBe(2);
  expect(index.matchedTokens([3, 4, 5])).toBe(0);
  done(index.removed(removed(["b", "unknown"])));
  expect(index.matchedTokens([1, 2, 3, 4, 5, 6, 7])).toBe(2);
  done(index.cleared());
  expect([index.matchedTokens([1, 2, 3]), index.size]).toEqual([0, 0]);
});

test("a block whose parent was missed is matched as soon as the parent is stored", () => {
  const index = indexOf();
  done(index.stored(stored(["b"], [3, 4], { parent: "a" })));
  expect(index.matchedTokens([1, 2, 3, 4, 5])).toBe(0);
  done(index.stored(stored(["a"], [1, 2])));
  expect(index.matchedTokens([1, 2, 3, 4, 5])).toBe(4);
});

test("a block is gone with its last copy; a repeated announcement is no copy", () => {
  const index = indexOf();
  done(index.stored(stored(["a", "b"], [1, 2, 3, 4])));
  done(index.stored(stored(["b"], [3, 4], { parent: "a" })));
  done(index.stored(stored(["a", "b"], [1, 2, 3, 4])));
  done(index.removed(removed(["b"])));
  expect(index.matchedTokens([1, 2, 3, 4, 5])).toBe(4);
  done(index.removed(removed(["b"])));
  expect(index.matchedTokens([1, 2, 3, 4, 5])).toBe(2);
  done(index.removed(removed(["a"])));
  expect(index.size).toBe(0);
});

test("an evicted block with children keeps its number for them", () => {
  const index = indexOf();
  done(index.stored(stored(["a", "b"], [1, 2, 3, 4])));
  done(index.removed(removed(["a"])));
  // Without that, "x" would get the number of "a" and its child with it.
  done(index.stored(stored(["x"], [7, 8])));
  expect(index.matchedTokens([7, 8, 3, 4, 5])).toBe(2);
  done(index.stored(stored(["a"], [1, 2])));
  expect(index.matchedTokens([1, 2, 3, 4, 5])).toBe(4);
  done(index.removed(removed(["b", "a", "x"])));
  expect(index.size).toBe(0);
});

describe("several KV cache groups", () => {
  const prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9];
  const all = ["a", "b", "c", "d"];
  const tokens = prompt.slice(0, 8);

  test("a prefix is cached where each group has what it needs", () => {
    const index = indexOf();
    done(index.stored(stored(all, tokens)));
    done(index.stored(stored(all, tokens, { group: { index: 1, needs: 3 } })));
    expect(index.matchedTokens(prompt)).toBe(8);
    // A window of four tokens needs the last two blocks of a prefix.
    done(index.removed(removed(["a", "b"], 1)));
    expect(index.matchedTokens(prompt)).toBe(8);
    done(index.removed(removed(["d"], 1)));
    expect(index.matchedTokens(prompt)).toBe(0);
    done(index.stored(stored(["b"], [3, 4], { parent: "a", group: { index: 1, needs: 3 } })));
    expect(index.matchedTokens(prompt)).toBe(6);
    done(index.removed(removed(["c"])));
    expect(index.matchedTokens(prompt)).toBe(0);
  });

  test("a group that leaves blocks out has them at their places by their hashes, not by their order", () => {
    const index = indexOf();
    done(index.stored(stored(["c"], tokens.slice(0, 6), { group: { index: 1, needs: "all" } })));
    done(index.stored(stored(all, tokens)));
    expect(index.matchedTokens(prompt)).toBe(6);
    done(
      index.stored(
        stored(["d"], tokens.slice(2), { parent: "a", group: { index: 1, needs: "all" } }),
      ),
    );
    expect(index.matchedTokens(prompt)).toBe(8);
  });
});

test("hashes that cover tokens after their block are told apart", () => {
  const index = indexOf();
  done(index.stored(stored(["a"], [1, 2], { lookahead: [[3]] })));
  done(index.stored(stored(["b"], [1, 2], { lookahead: [[9]] })));
  expect([index.matchedTokens([1, 2, 3]), index.matchedTokens([1, 2, 4])]).toEqual([2, 0]);
  done(index.removed(removed(["a"])));
  expect([index.matchedTokens([1, 2, 3]), index.matchedTokens([1, 2, 9])]).toEqual([0, 2]);
  expect(index.contradictions).toBe(0);
});

test("a publisher that lies: wrong places are counted, and memory stays within the limit", () => {
  const index = indexOf(100);
  done(index.stored(stored(["a"], [1, 2], { parent: "a" })));
  done(index.stored(stored(["b"], [3, 4])));
  done(index.stored(stored(["b"], [5, 6])));
  done(index.stored(stored(["c"], [3, 4])));
  expect(index.contradictions).toBe(3);
  expect(index.matchedTokens([3, 4, 5])).toBe(2);
  for (let at = 0; at < 1000; at += 1)
    done(index.stored(stored([`x${at}`], [at, at], { parent: `p${at}` })));
  expect([index.size <= 100, index.refused > 0]).toEqual([true, true]);
  for (let group = 1; group < 1000; group += 1)
    done(index.stored(stored(["x"], [9, 9], { group: { index: group, needs: "all" } })));
  // A group that has nothing keeps all from being a match.
  expect(index.matchedTokens([3, 4, 5])).toBe(0);
  done(index.cleared());
  done(index.stored(stored(["b"], [3, 4])));
  expect(index.matchedTokens([3, 4, 5])).toBe(2);
});

test("A5: many blocks are stored, removed and cleared in steps, and nothing is found from the begin of clearing on", () => {
  const tree = new BlockTree();
  const index = indexOf(undefined, tree);
  const count = 5000;
  const hashes = Array.from({ length: count }, (_, at) => `${at}`);
  const tokens = Array.from({ length: 2 * count }, (_, at) => at);
  const prompt = [...tokens, 0];
  const steps = (of: Steps) => [...of].length;
  expect(steps(index.stored(stored(hashes, tokens)))).toBeGreaterThan(10);
  expect(index.matchedTokens(prompt)).toBe(2 * count);
  // Announced again, it is no copy.
  expect(steps(index.stored(stored(hashes, tokens)))).toBeGreaterThan(10);
  expect(steps(index.removed(removed(hashes.slice(count / 2))))).toBeGreaterThan(5);
  expect(index.matchedTokens(prompt)).toBe(count);
  const clearing = index.cleared();
  expect([index.matchedTokens(prompt), index.size, tree.size]).toEqual([0, 0, count / 2]);
  clearing.next();
  // What comes meanwhile is not dropped with what was there.
  done(index.stored(stored(["0"], [0, 1])));
  expect(steps(clearing)).toBeGreaterThan(5);
  expect([index.matchedTokens(prompt), index.size, tree.size]).toEqual([2, 1, 1]);
  expect(tree.holders(prompt).map((found) => [...found.instances])).toEqual([[instance]]);
});
