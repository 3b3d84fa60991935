import { expect, test } from "vitest";
import type { MissingPart } from "../../library/missing-parts.js";
import { pluginCheck } from "./plugins.js";

const check = (missing: readonly MissingPart[], selected = false, wanted = false) =>
  pluginCheck(
    {
      name: "LIBFABRIC",
      file: "/n/plugins/libplugin_LIBFABRIC.so",
      loads: missing.length === 0,
      missing,
      supplied: [],
      remedy: missing.length === 0 ? undefined : "the remedy",
    },
    { selected, wanted },
  );
const LIBRARY = [{ kind: "library", name: "libfabric.so.1" }] as const;

test("a plugin that loads is ok; one that lacks a library is a note, a warning or a failure, depending on its use", () => {
  expect(check([])).toMatchObject({ status: "ok", found: "loads" });
  expect(check([], true)).toMatchObject({ status: "ok", found: "loads; selected" });
  expect(check(LIBRARY)).toMatchObject({
    status: "note",
    found: expect.stringContaining("lacks libfabric.so.1"),
  });
  expect(check(LIBRARY)).not.toHaveProperty("fix");
  expect(check(LIBRARY, false, true)).toMatchObject({ status: "warn", fix: "the remedy" });
  expect(check(LIBRARY, true)).toMatchObject({ status: "fail", fix: "the remedy" });
});

test("a missing symbol version is named", () => {
  const version = [{ kind: "version", name: "FABRIC_1.10", library: "libfabric.so.1" }] as const;
  expect(check(version, true)).toMatchObject({
    status: "fail",
    found: expect.stringContaining("FABRIC_1.10 of libfabric.so.1"),
  });
});

test("TensorRT-LLM#9752: an undefined symbol is named", () => {
  expect(check([{ kind: "symbol", name: "cuInit" }], true)).toMatchObject({
    status: "fail",
    found: expect.stringContaining("lacks the symbol cuInit"),
  });
});

test("a damaged plugin gives a warning even when it is not selected", () => {
  expect(check([{ kind: "file", reason: "file too short" }])).toMatchObject({
    status: "warn",
    found: "is damaged: file too short",
    fix: "the remedy",
  });
});
