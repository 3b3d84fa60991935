import { expect, test } from "vitest";
import type { MissingPart } from "../../library/missing-parts.js";
import { pluginCheck } from "./plugins.js";

const LIBRARY: MissingPart = { kind: "library", name: "libfabric.so.1" };
const VERSION: MissingPart = { kind: "version", name: "FABRIC_1.10", library: "libfabric.so.1" };
const SYMBOL: MissingPart = { kind: "symbol", name: "cuInit" };
const DAMAGED: MissingPart = { kind: "file", reason: "file too short" };
const UNUSED = { selected: false, wanted: false };
const SELECTED = { ...UNUSED, selected: true };

test.each([
  ["a plugin that loads", [], UNUSED, "ok", "loads"],
  ["a selected plugin that loads", [], SELECTED, "ok", "loads; selected"],
  ["a plugin that lacks a library", [LIBRARY], UNUSED, "note", "lacks libfabric.so.1"],
  ["the same, wanted", [LIBRARY], { ...UNUSED, wanted: true }, "warn", "lacks libfabric.so.1"],
  ["the same, selected", [LIBRARY], SELECTED, "fail", "lacks libfabric.so.1"],
  [
    "a missing symbol version is named",
    [VERSION],
    SELECTED,
    "fail",
    "FABRIC_1.10 of libfabric.so.1",
  ],
  [
    "TensorRT-LLM#9752: an undefined symbol is named",
    [SYMBOL],
    SELECTED,
    "fail",
    "the symbol cuInit",
  ],
  ["a damaged plugin, even unselected", [DAMAGED], UNUSED, "warn", "is damaged: file too short"],
] as const)("%s", (_, missing, use, status, found) => {
  const loads = missing.length === 0;
  const remedy = loads ? undefined : "the remedy";
  const plugin = { name: "LIBFABRIC", file: "/n/plugin.so", loads, missing, supplied: [], remedy };
  const check = pluginCheck(plugin, use);
  expect(check).toMatchObject({ status, found: expect.stringContaining(found) });
  expect(check.fix).toBe(status === "note" ? undefined : remedy);
});
