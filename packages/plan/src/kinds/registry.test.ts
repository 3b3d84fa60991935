import { expect, test } from "vitest";
import { refused } from "../refused.test-support.js";
import type { CacheKind } from "./cache-kind.js";
import { cacheKind, cacheKindNames, registerCacheKind } from "./registry.js";

test("each kind name gives its sharding and the extent of its block list", () => {
  // Tests of other files in this process may have registered kinds behind them.
  const said = cacheKindNames()
    .slice(0, 6)
    .map((name) => {
      const { sharding, extent, pieces } = cacheKind(name);
      return [name, sharding, extent, pieces !== undefined];
    });
  expect(said).toEqual([
    ["full", "heads", "sequence", false],
    ["mla", "replicated", "sequence", false],
    ["swa", "heads", "window", false],
    ["swa-mla", "replicated", "window", false],
    ["mamba", "state", "state", true],
    ["circular", "replicated", "whole", false],
  ]);
});

test("refuses an unknown kind", () => {
  refused(
    () => cacheKind("linear"),
    "KV_PLAN_INVALID",
    '"linear" is none of full, mla, swa, swa-mla, mamba, circular',
  );
  refused(() => cacheKind(""), "KV_PLAN_INVALID", '"" is none of full');
});

test("a kind of another package is known after its registration, which may be repeated", () => {
  const ours: CacheKind = { name: "ours", sharding: "heads", extent: "sequence" };
  registerCacheKind(ours);
  registerCacheKind(ours);
  expect(cacheKind("ours")).toBe(ours);
  expect(() => registerCacheKind({ ...ours })).toThrow('"ours": another kind has this name');
});

test.each<[string, object, string]>([
  ["a name that is taken", { name: "full" }, '"full": another kind has this name'],
  ["an empty name", { name: "" }, "the name is not a text"],
  [
    "an unknown sharding",
    { sharding: "rows" },
    'sharding is "rows", none of heads, replicated, state',
  ],
  [
    "an unknown extent",
    { extent: "all" },
    'extent is "all", none of sequence, window, state, whole',
  ],
  ["a state without pieces", { sharding: "state" }, "a state needs pieces"],
])("refuses to register %s", (_what, change, message) => {
  const kind = { name: "bad", sharding: "heads", extent: "sequence", ...change } as CacheKind;
  refused(() => registerCacheKind(kind), "KV_PLAN_INVALID", message);
});
