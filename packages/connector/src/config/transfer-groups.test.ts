import type { KvCacheConfig, KvCacheRegion } from "@kv/interface";
import { simConfig } from "@kv/testing/simulator/sim-options";
import { expect, it } from "vitest";
import { transferGroups, transferredCaches } from "./transfer-groups.js";

const config = (...flags: (boolean | undefined)[]): KvCacheConfig => ({
  ...simConfig(16),
  groups: flags.map((enableKvTransfer, at) => ({
    kind: "full",
    layerNames: [`layers.${at}`],
    enableKvTransfer,
  })),
});
const region = (groupId: number, groupIds?: readonly number[]) =>
  ({
    name: `r${groupId}`,
    groupId,
    ...(groupIds === undefined ? {} : { groupIds }),
  }) as KvCacheRegion;

it("numbers the groups that take part, as vLLM 0.33's transfer_groups, in regions and block lists", () => {
  const cache = config(false, undefined, true);
  const regions = [
    region(0),
    region(1),
    region(2),
    region(-1, [0, 2]),
    region(-1, [0]),
    region(-1),
  ];
  const caches = transferredCaches({ config: cache, regions });
  expect(caches.config.groups.map(({ layerNames }) => layerNames)).toEqual([
    ["layers.1"],
    ["layers.2"],
  ]);
  expect(caches.regions).toMatchObject([
    { name: "r1", groupId: 0 },
    { name: "r2", groupId: 1 },
    { groupId: -1, groupIds: [1] },
    { groupId: -1 },
  ]);
  expect(transferGroups(cache)?.select([[1], [2], [3]])).toEqual([[2], [3]]);
});

it("a cache whose groups all take part stays as it is", () => {
  const caches = { config: config(true, undefined), regions: [] };
  expect(transferGroups(caches.config)).toBeUndefined();
  expect(transferredCaches(caches)).toBe(caches);
});

it("a state that takes no part still keeps the last token for D", () => {
  const [full, state] = config(true, false).groups;
  const groups = [full, { ...state, kind: "mamba" }] as KvCacheConfig["groups"];
  const narrowed = transferGroups({
    ...simConfig(16),
    groups,
    stateSpace: { convProjectionBytes: [8], recurrentBytes: 8 },
  })?.config;
  expect(narrowed).toMatchObject({ prefillBackoffTokens: 1 });
  expect(narrowed).not.toHaveProperty("stateSpace");
});

it("a cache without a group that takes part, and lists of another number of groups, are refused", () => {
  expect(() => transferGroups(config(false))).toThrow(/every group/);
  expect(() => transferGroups(config(true, false))?.select([[1]])).toThrow(
    /1 KV cache groups, its cache has 2/,
  );
});
