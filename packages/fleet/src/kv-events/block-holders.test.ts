import fc from "fast-check";
import { expect, test } from "vitest";
import type { Instance } from "../instances/instance.js";
import { prefixAware } from "../routing/prefix-aware.js";
import { BlockHolders } from "./block-holders.js";
import { BlockIndex, holdersOfPrompt } from "./block-index.js";

const GROUP = { index: 0, needs: "all" } as const;
const BLOCK = 2;

/** Instances whose indexes share one table. */
function fleetOf(count: number) {
  const holders = new BlockHolders();
  const instances = Array.from({ length: count }, (_, at) => {
    const instance = { role: "prefill", url: `http://i${at}`, inFlight: 0 } as const satisfies Instance;
    return { instance, index: new BlockIndex(undefined, { holders, instance }) };
  });
  return { holders, instances };
}

/** The instance stores the prompt from a block on. */
function store(index: BlockIndex, prompt: readonly number[], from = 0): void {
  const hashes = prompt.map((_, at) => prompt.slice(0, at + 1).join(" "));
  index.stored({
    hashes: hashes.slice(from),
    parent: hashes[from - 1],
    tokens: tokensOf(prompt.slice(from)).slice(0, -1),
    blockSize: BLOCK,
    group: GROUP,
  });
}

/** A block is a number, which is each of its tokens. */
const tokensOf = (blocks: readonly number[]) => [...blocks.flatMap((block) => Array(BLOCK).fill(block)), 0];

test("each instance that has a begin of a prompt is found, and a begin that was removed is not", () => {
  const prompt = fc.array(fc.nat(2), { minLength: 1, maxLength: 12 });
  const step = fc.record({ at: fc.nat(5), prompt, removed: fc.boolean(), cleared: fc.nat(20) });
  fc.assert(
    fc.property(fc.array(step, { maxLength: 40 }), prompt, (steps, asked) => {
      const { holders, instances } = fleetOf(6);
      const all = [...steps.map((one) => one.prompt), asked];
      for (const { at, prompt: stored, removed, cleared } of steps) {
        const index = instances[at]?.index;
        if (cleared === 0) index?.cleared();
        else if (removed) index?.removed({ hashes: [stored.join(" ")], group: 0 });
        else if (index !== undefined) store(index, stored);
      }
      for (const blocks of all) {
        const tokens = tokensOf(blocks);
        const found = holdersOfPrompt(holders, tokens);
        for (const { instance, index } of instances) {
          const isFound = found.some(({ instances: set }) => set.has(instance));
          expect(isFound).toBe(index.matchedTokens(tokens) > 0);
        }
        // The longest first: each has all that are in the one before it.
        for (const [i, { instances: set, tokens: least }] of found.entries()) {
          expect(set.size).toBeGreaterThan(found[i - 1]?.instances.size ?? 0);
          expect([...(found[i - 1]?.instances ?? [])].filter((instance) => !set.has(instance))).toEqual([]);
          expect(tokens.length).toBeGreaterThan(least ?? 0);
        }
      }
      for (const { index } of instances) index.cleared();
      expect(holders.size).toBe(0);
      expect(all.flatMap((blocks) => holdersOfPrompt(holders, tokensOf(blocks)))).toEqual([]);
    }),
  );
});

test("an instance that has a later block without the first does not hide one that has the first", () => {
  const { holders, instances } = fleetOf(2);
  const [whole, first] = instances;
  if (whole === undefined || first === undefined) throw new Error("no instances");
  const prompt = Array.from({ length: 40 }, (_, at) => at);
  store(whole.index, prompt);
  store(first.index, prompt.slice(0, 1));
  whole.index.removed({ hashes: ["0"], group: 0 });
  const found = holdersOfPrompt(holders, tokensOf(prompt));
  expect(found.some(({ instances: set }) => set.has(first.instance))).toBe(true);
});

test("a block whose parent comes later does not hide its instance", () => {
  const { holders, instances } = fleetOf(1);
  const [one] = instances;
  if (one === undefined) throw new Error("no instance");
  store(one.index, [1, 2, 3, 4], 2);
  expect(holdersOfPrompt(holders, tokensOf([1, 2, 3, 4]))).toEqual([]);
  store(one.index, [1, 2]);
  expect(
    holdersOfPrompt(holders, tokensOf([1, 2, 3, 4])).some(({ instances: set }) => set.has(one.instance)),
  ).toBe(true);
});

test("publishers with other sizes of blocks are followed up to a limit", () => {
  const { holders, instances } = fleetOf(40);
  const stored = (index: BlockIndex, blockSize: number) =>
    index.stored({
      hashes: ["h"],
      parent: undefined,
      tokens: Array(blockSize).fill(1),
      blockSize,
      group: GROUP,
    });
  for (const [at, { index }] of instances.entries()) stored(index, at + 1);
  const prompt = Array(100).fill(1);
  expect(new Set(holdersOfPrompt(holders, prompt).flatMap((found) => [...found.instances])).size).toBe(8);
  for (const { index } of instances) index.cleared();
  const [one] = instances;
  if (one !== undefined) stored(one.index, 50);
  expect(holdersOfPrompt(holders, prompt)).toHaveLength(1);
});

test("of 2,048 instances that have a prompt, few are asked, and the one that has more of it is chosen", () => {
  const { holders, instances } = fleetOf(2048);
  const shared = Array.from({ length: 8 }, (_, at) => at);
  const more = Array.from({ length: 80 }, (_, at) => 100 + at);
  for (const { index } of instances) store(index, shared);
  const best = instances[1234];
  if (best === undefined) throw new Error("no instance");
  store(best.index, [...shared, ...more]);
  const indexes = new Map<Instance, BlockIndex>(instances.map(({ instance, index }) => [instance, index]));
  let asked = 0;
  const routing = prefixAware({
    cached: {
      matchedTokens(instance, tokens) {
        asked += 1;
        return indexes.get(instance)?.matchedTokens(tokens);
      },
      holders: (tokens) => holdersOfPrompt(holders, tokens),
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
