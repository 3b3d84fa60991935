import { KvError } from "@kv/interface";
import { expect, test } from "vitest";
import { cacheKind, cacheKindNames } from "./registry.js";

test("each kind name gives its sharding and the extent of its block list", () => {
  const said = cacheKindNames().map((name) => {
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
  expect(() => cacheKind("linear")).toThrow(/"linear" is none of full, mla, swa, swa-mla, mamba, circular/);
  try {
    cacheKind("");
  } catch (error) {
    expect(KvError.is(error) && error.code).toBe("KV_PLAN_INVALID");
  }
});
