import fc from "fast-check";
import { expect, test } from "vitest";
import type { Instance } from "../instances/instance.js";
import { prefixAware } from "../routing/prefix-aware.js";
import { BlockIndex, type Steps } from "./block-index.js";
import { BlockTree, placeHash } from "./block-tree.js";

const GROUP = { index: 0, needs: "all" } as const;
const BLOCK = 2;

/** Runs all steps. */
const done = (steps: Steps | undefined) => void [...(steps ?? [])];

/** Instances whose blocks are in one tree. */
function fleetOf(count: number) {
  const tree = new BlockTree();
  const instances = Array.from({ length: count }, (_, at) => {
    const instance = {
      role: "prefill",
      url: `http://i${at}`,
      inFlight: 0,
    } as const satisfies Instance;
    return { instance, index: new BlockIndex(tree, instance) };
  });
  return { tree, instances };
}

/** The instance stores the prompt from a block on. */
function store(index: BlockIndex, prompt: readonly number[], from = 0): void {
  const hashes = prompt.map((_, at) => prompt.slice(0, at + 1).join(" "));
  const steps = index.stored({
    hashes: hashes.slice(from),
    parent: hashes[from - 1],
    tokens: tokensOf(prompt.slice(from)).slice(0, -1),
    blockSize: BLOCK,
    group: GROUP,
  });
  done(steps);
}

/** Tokens of the first blocks of a prompt that an instance has. */
function matchedIn(
  copies: ReadonlyMap<string, number> | undefined,
  blocks: readonly number[],
): number {
  const missing = blocks.findIndex(
    (_, at) => copies?.has(blocks.slice(0, at + 1).join(" ")) !== true,
  );
  return BLOCK * (missing === -1 ? blocks.length : missing);
}

/** A block is a number, which is each of its tokens. */
const tokensOf = (blocks: readonly number[]) => [
  ...blocks.flatMap((block) => Array(BLOCK).fill(block)),
  0,
];

test("each instance that has a begin of a prompt is found with what it has of it", () => {
  const prompt = fc.array(fc.nat(2), { minLength: 1, maxLength: 12 });
  const step = fc.record({ at: fc.nat(5), prompt, removed: fc.boolean(), cleared: fc.nat(20) });
  fc.assert(
    fc.property(fc.array(step, { maxLength: 40 }), prompt, (steps, asked) => {
      const { tree, instances } = fleetOf(6);
      const all = [...steps.map((one) => one.prompt), asked];
      const stored = new Map(instances.map(({ index }) => [index, new Map<string, number>()]));
      for (const { at, prompt: blocks, removed, cleared } of steps) {
        const index = instances[at]?.index;
        const copies = index === undefined ? undefined : stored.get(index);
        if (index === undefined || copies === undefined) continue;
        const hashes = blocks.map((_, block) => blocks.slice(0, block + 1).join(" "));
        if (cleared === 0) {
          done(index.cleared());
          copies.clear();
        } else if (removed) {
          const hash = blocks.join(" ");
          done(index.removed({ hashes: [hash], group: 0 }));
          const left = (copies.get(hash) ?? 0) - 1;
          if (left > 0) copies.set(hash, left);
          else copies.delete(hash);
        } else {
          store(index, blocks);
          // A repeated announcement is no copy.
          if (!hashes.every((hash) => copies.has(hash)))
            for (const hash of hashes) copies.set(hash, (copies.get(hash) ?? 0) + 1);
        }
      }
      for (const blocks of all) {
        const tokens = tokensOf(blocks);
        const found = tree.holders(tokens);
        for (const { instance, index } of instances) {
          const longest = found.find(({ instances: set }) => set.has(instance))?.tokens ?? 0;
          expect(longest).toBeGreaterThanOrEqual(index.matchedTokens(tokens));
          // What an instance has behind a block that it has removed is not matched.
          expect(index.matchedTokens(tokens)).toBe(matchedIn(stored.get(index), blocks));
        }
        for (const [i, { tokens: length }] of found.entries())
          expect(length).toBeLessThan(found[i - 1]?.tokens ?? tokens.length);
      }
      for (const { index } of instances) done(index.cleared());
      expect(tree.size).toBe(0);
      expect(all.flatMap((blocks) => tree.holders(tokensOf(blocks)))).toEqual([]);
    }),
  );
});

test("a block whose parent comes later does not hide its instance", () => {
  const { tree, instances } = fleetOf(1);
  const [one] = instances;
  if (one === undefined) throw new Error("no instance");
  store(one.index, [1, 2, 3, 4], 2);
  expect(tree.holders(tokensOf([1, 2, 3, 4]))).toEqual([]);
  store(one.index, [1, 2]);
  expect(
    tree.holders(tokensOf([1, 2, 3, 4])).some(({ instances: set }) => set.has(one.instance)),
  ).toBe(true);
});

test("publishers with other sizes of blocks are followed up to a limit", () => {
  const { tree, instances } = fleetOf(40);
  const stored = (index: BlockIndex, blockSize: number) =>
    done(
      index.stored({
        hashes: ["h"],
        parent: undefined,
        tokens: Array(blockSize).fill(1),
        blockSize,
        group: GROUP,
      }),
    );
  for (const [at, { index }] of instances.entries()) stored(index, at + 1);
  const prompt = Array(100).fill(1);
  expect(new Set(tree.holders(prompt).flatMap((found) => [...found.instances])).size).toBe(8);
  for (const { index } of instances) done(index.cleared());
  const [one] = instances;
  if (one !== undefined) stored(one.index, 50);
  expect(tree.holders(prompt)).toHaveLength(1);
});

test("of 2,048 instances that have a prompt, few are asked, and the one that has more of it is chosen", () => {
  const { tree, instances } = fleetOf(2048);
  const shared = Array.from({ length: 8 }, (_, at) => at);
  const more = Array.from({ length: 80 }, (_, at) => 100 + at);
  for (const { index } of instances) store(index, shared);
  const best = instances[1234];
  if (best === undefined) throw new Error("no instance");
  store(best.index, [...shared, ...more]);
  const indexes = new Map<Instance, BlockIndex>(
    instances.map(({ instance, index }) => [instance, index]),
  );
  let asked = 0;
  const routing = prefixAware({
    cached: {
      matchedTokens(instance, tokens) {
        asked += 1;
        return indexes.get(instance)?.matchedTokens(tokens);
      },
      holders: (tokens) => tree.holders(tokens),
      follow() {},
      close() {},
    },
  });
  const all = instances.map(({ instance }) => instance);
  const choose = (prompt: readonly number[]) =>
    routing.choose(all, { requestId: "r", request: { fields: { prompt: tokensOf(prompt) } } });
  expect(choose([...shared, ...more])).toBe(best.instance);
  expect(asked).toBeLessThan(10);
  expect(choose([...shared, 7])).toBeDefined();
  expect(asked).toBeLessThan(20);
});

test("tokens that are chosen to fit the numbers of their parents do not bring all blocks to one entry", () => {
  const parents = Array.from({ length: 1000 }, (_, at) => at + 1);
  const fitting = (parent: number) => Math.imul(parent, 0x9e3779b1) >>> 0;
  expect(new Set(parents.map((parent) => placeHash(parent, fitting(parent)))).size).toBeGreaterThan(
    990,
  );
});

test("a block that several instances have is one block, and its last holder takes it along", () => {
  const { tree, instances } = fleetOf(40);
  for (const { index } of instances) store(index, [1, 2, 3]);
  expect(tree.size).toBe(3);
  const [first, ...others] = instances;
  for (const { index } of others) done(index.removed({ hashes: ["1 2 3"], group: 0 }));
  expect(tree.holders(tokensOf([1, 2, 3])).map(({ instances: set }) => set.size)).toEqual([1, 40]);
  done(first?.index.cleared());
  expect(tree.size).toBe(2);
});
