import { KvError } from "@kv/interface";
import fc from "fast-check";
import { expect, test } from "vitest";
import {
  computeTpMapping,
  handshakeSourceRanks,
  kvHeadsOfRank,
  type TpMappingOptions,
} from "./index.js";

const dense = (change: Partial<TpMappingOptions>): TpMappingOptions => ({
  tpRank: 0,
  tpSize: 1,
  remoteTpSize: 1,
  numKvHeads: 8,
  isMla: false,
  groups: ["full"],
  ...change,
});

test("more decode ranks: each reads its share of one prefill rank, which waits for all its readers", () => {
  const mapping = computeTpMapping(dense({ tpRank: 3, tpSize: 4, remoteTpSize: 2 }));
  expect(mapping).toMatchObject({
    allSourceRanks: [1],
    rankOffsetFactor: 1,
    localConsumers: 2,
    notifyOnlyRanks: [],
  });
});

test("more prefill ranks than heads: one copy of each head is read, the others are notified", () => {
  const mapping = computeTpMapping(dense({ remoteTpSize: 8, numKvHeads: 4 }));
  expect(mapping.sourceRanksPerGroup).toEqual([[0, 2, 4, 6]]);
  expect(mapping.rankToAttentionSlot).toEqual({ 0: 0, 2: 1, 4: 2, 6: 3 });
  expect(mapping.notifyOnlyRanks).toEqual([1, 3, 5, 7]);
  expect(mapping.localConsumers).toBe(1);
});

test("MLA: a decode rank reads one replica, and different decode ranks read different ones", () => {
  const mapping = computeTpMapping(
    dense({ tpRank: 1, tpSize: 2, remoteTpSize: 8, isMla: true, groups: ["mla"] }),
  );
  expect(mapping).toMatchObject({
    allSourceRanks: [4],
    handshakeRanks: [4, 5, 6, 7],
    notifyOnlyRanks: [5, 6, 7],
  });
});

test("state-space groups are read from every rank, even where KV heads are replicated", () => {
  const pair = { tpRank: 1, tpSize: 2, remoteTpSize: 8, numKvHeads: 4 };
  const mapping = computeTpMapping(dense({ ...pair, groups: ["full", "mamba"] }));
  expect(mapping.sourceRanksPerGroup).toEqual([
    [4, 6],
    [4, 5, 6, 7],
  ]);
  expect(mapping.allSourceRanks).toEqual([4, 5, 6, 7]);
  expect(mapping.rankToAttentionSlot).toEqual({ 4: 0, 5: 0, 6: 1, 7: 1 });
  expect(mapping.notifyOnlyRanks).toEqual([]);
  const alone = computeTpMapping(dense({ ...pair, groups: ["mamba"] }));
  expect(alone.sourceRanksPerGroup).toEqual([[4, 5, 6, 7]]);
});

test("DCP-sharded MLA with a state-space group: reads latents from the shards' ranks, and state from its TP counterparts", () => {
  const latents = dense({
    isMla: true,
    groups: ["mla", "mamba"],
    tpRank: 1,
    tpSize: 2,
    dcpSize: 2,
  });
  const more = computeTpMapping({ ...latents, remoteTpSize: 4, remoteDcpSize: 4 });
  expect(more.sourceRanksPerGroup).toEqual([
    [1, 3],
    [2, 3],
  ]);
  expect(more.allSourceRanks).toEqual([1, 2, 3]);
  const equal = computeTpMapping({ ...latents, dcpSize: 1, remoteTpSize: 2, remoteDcpSize: 2 });
  expect(equal.sourceRanksPerGroup).toEqual([
    [0, 1],
    [0, 1],
  ]);
});

test("a draft model with KV heads beside an MLA target is mapped by its own heads, with and without DCP", () => {
  const target = dense({ isMla: true, tpRank: 3, tpSize: 4, remoteTpSize: 2 });
  expect(computeTpMapping(target)).toMatchObject({ allSourceRanks: [1], rankOffsetFactor: 0 });
  expect(computeTpMapping({ ...target, headShardedKvHeads: 8 })).toMatchObject({
    allSourceRanks: [1],
    rankOffsetFactor: 1,
  });
  const fewer = dense({
    isMla: true,
    tpSize: 1,
    remoteTpSize: 4,
    remoteDcpSize: 4,
    headShardedKvHeads: 2,
  });
  expect(computeTpMapping(fewer)).toMatchObject({
    attentionRanks: [0, 2],
    handshakeRanks: [0, 1, 2, 3],
    notifyOnlyRanks: [1, 3],
  });
});

test("ranks that are read only for their state have an attention slot too", () => {
  const mapping = computeTpMapping({
    tpRank: 0,
    tpSize: 1,
    remoteTpSize: 4,
    numKvHeads: 1,
    isMla: false,
    groups: ["full", "mamba"],
  });
  expect(mapping.sourceRanksPerGroup).toEqual([[0], [0, 1, 2, 3]]);
  expect(mapping.rankToAttentionSlot).toEqual({ 0: 0, 1: 0, 2: 0, 3: 0 });
});

test("with TP 512 on both sides, each rank reads its counterpart", () => {
  const pair = {
    tpSize: 512,
    remoteTpSize: 512,
    numKvHeads: 512,
    isMla: false,
    groups: ["full" as const],
  };
  for (const tpRank of [255, 256, 300, 511]) {
    const mapping = computeTpMapping({ ...pair, tpRank });
    expect(mapping.handshakeRanks).toEqual([tpRank]);
    expect(mapping.attentionRanks).toEqual([tpRank]);
    expect(mapping.rankToAttentionSlot).toEqual({ [tpRank]: 0 });
    expect(
      Object.isFrozen(mapping.attentionRanks) && Object.isFrozen(mapping.rankToAttentionSlot),
    ).toBe(true);
  }
});

test("a mapping is deeply frozen", () => {
  const mapping = computeTpMapping(dense({}));
  expect(Object.isFrozen(mapping)).toBe(true);
  for (const value of Object.values(mapping))
    expect(typeof value !== "object" || Object.isFrozen(value)).toBe(true);
  expect(Object.isFrozen(mapping.sourceRanksPerGroup[0])).toBe(true);
});

test.each([
  [{ tpSize: 2, remoteTpSize: 3 }, /TP size 2 and remote TP size 3/],
  [{ tpRank: 2, tpSize: 2 }, /tpRank 2 is not below tpSize 2/],
  [{ tpRank: -1 }, /tpRank must be an integer of at least 0, got -1/],
  [{ tpSize: 1.5 }, /tpSize must be an integer of at least 1, got 1.5/],
  [{ numKvHeads: 0 }, /numKvHeads must be an integer of at least 1, got 0/],
  [
    { isMla: true, headShardedKvHeads: 0 },
    /headShardedKvHeads must be an integer of at least 1, got 0/,
  ],
  [{ groups: [] }, /at least one KV cache group/],
  [{ remoteDcpSize: 0 }, /remoteDcpSize must be an integer of at least 1, got 0/],
])("refuses %j with the values", (change, message) => {
  const attempt = () => computeTpMapping(dense(change as Partial<TpMappingOptions>));
  expect(attempt).toThrow(message);
  try {
    attempt();
  } catch (error) {
    expect(KvError.is(error, "KV_TOPOLOGY_INVALID")).toBe(true);
  }
});

test("refuses KV heads when neither their number nor the TP size divides the other", () => {
  expect(() => kvHeadsOfRank(0, 4, 6)).toThrow(/6 KV heads cannot be split over TP size 4/);
  expect(kvHeadsOfRank(5, 6, 3)).toEqual({ firstHead: 2, numHeads: 1 });
});

test("the sources of a rank hold each of its KV heads once, in slot order", () => {
  const sizes = fc.record({
    tpSize: fc.integer({ min: 1, max: 32 }),
    remoteTpSize: fc.integer({ min: 1, max: 32 }),
    numKvHeads: fc.integer({ min: 1, max: 64 }),
  });
  const divides = (one: number, other: number) => one % other === 0 || other % one === 0;
  const possible = sizes.filter(({ tpSize, remoteTpSize, numKvHeads }) => {
    return (
      divides(tpSize, remoteTpSize) &&
      divides(tpSize, numKvHeads) &&
      divides(remoteTpSize, numKvHeads)
    );
  });
  fc.assert(
    fc.property(possible, ({ tpSize, remoteTpSize, numKvHeads }) => {
      const notifications = new Map<number, number>();
      for (let tpRank = 0; tpRank < tpSize; tpRank++) {
        const mapping = computeTpMapping(dense({ tpRank, tpSize, remoteTpSize, numKvHeads }));
        const mine = kvHeadsOfRank(tpRank, tpSize, numKvHeads);
        const share = mine.numHeads / mapping.allSourceRanks.length;
        for (const rank of mapping.allSourceRanks) {
          const slot = mapping.rankToAttentionSlot[rank] ?? -1;
          const first =
            kvHeadsOfRank(rank, remoteTpSize, numKvHeads).firstHead +
            mapping.rankOffsetFactor * share;
          expect(first).toBe(mine.firstHead + slot * share);
        }
        for (const rank of [...mapping.allSourceRanks, ...mapping.notifyOnlyRanks]) {
          notifications.set(rank, (notifications.get(rank) ?? 0) + 1);
        }
        for (const rank of mapping.handshakeRanks) expect(notifications.has(rank)).toBe(true);
      }
      const awaited = computeTpMapping(dense({ tpSize, remoteTpSize, numKvHeads })).localConsumers;
      for (let rank = 0; rank < remoteTpSize; rank++) expect(notifications.get(rank)).toBe(awaited);
    }),
    { numRuns: 500 },
  );
});

test("more prefill ranks than heads, beside a state of all ranks: those of a head share its slot", () => {
  const mapping = computeTpMapping(
    dense({ remoteTpSize: 8, numKvHeads: 4, groups: ["full", "mamba"] }),
  );
  expect(mapping.allSourceRanks).toEqual([0, 1, 2, 3, 4, 5, 6, 7]);
  expect(mapping.rankToAttentionSlot).toEqual({ 0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3 });
});

test("one attention rank, beside a state of several: all have slot 0", () => {
  const mapping = computeTpMapping(
    dense({ remoteTpSize: 2, numKvHeads: 1, groups: ["full", "mamba"] }),
  );
  expect(mapping.attentionRanks).toEqual([0]);
  expect(mapping.rankToAttentionSlot).toEqual({ 0: 0, 1: 0 });
});

test.each([
  ["a larger D", { tpSize: 4, remoteTpSize: 2 }, [[0], [0], [1], [1]]],
  [
    "a larger P",
    { tpSize: 2, remoteTpSize: 4 },
    [
      [0, 1],
      [2, 3],
    ],
  ],
  [
    "slices of two, and of four at the peer",
    { tpSize: 4, remoteTpSize: 4, dcpSize: 2, remoteDcpSize: 4 },
    [[0, 2], [1, 3], [], []],
  ],
  [
    "slices of two, and whole sequences at the peer",
    { tpSize: 2, remoteTpSize: 2, dcpSize: 2 },
    [
      [0, 1],
      [0, 1],
    ],
  ],
])("the ranks of the peer that shake hands with each rank: %s", (_, sizes, expected) => {
  const ranks = Array.from({ length: sizes.tpSize }, (_, tpRank) =>
    handshakeSourceRanks({ tpRank, ...sizes }),
  );
  expect(ranks).toEqual(expected);
});
