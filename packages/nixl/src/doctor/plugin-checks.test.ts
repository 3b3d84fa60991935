import { expect, test } from "vitest";
import type { ChildOutcome } from "../child/child-process.js";
import { pluginCheck, pluginNames } from "./plugin-checks.js";

const said = (problem?: string): ChildOutcome => ({
  kind: "answered",
  value: problem === undefined ? {} : { problem },
  output: "",
});
const MISSING = "libfabric.so.1: cannot open shared object file: No such file or directory";
const check = (outcome: ChildOutcome, chosen = false, wanted = false) =>
  pluginCheck("LIBFABRIC", outcome, { chosen, wanted });

test("names come from the files", () => {
  expect(pluginNames(["libplugin_UCX.so", "libplugin_GDS_MT.so", "libtelemetry_exporter_doca.so"])).toEqual([
    "UCX",
    "GDS_MT",
  ]);
});

test("what loads is fine; what lacks a library is as bad as it is needed", () => {
  expect(check(said())).toMatchObject({ status: "ok" });
  expect(check(said(MISSING))).toMatchObject({ status: "note", details: { missing: "libfabric.so.1" } });
  expect(check(said(MISSING), false, true)).toMatchObject({
    status: "warn",
    fix: expect.stringContaining("install"),
  });
  expect(check(said(MISSING), true)).toMatchObject({
    status: "fail",
    found: expect.stringContaining("libfabric.so.1 is missing"),
  });
});

test("a symbol version that is missing is named", () => {
  const problem = "/lib/libfabric.so.1: version `FABRIC_1.10' not found (required by libplugin_LIBFABRIC.so)";
  expect(check(said(problem), true)).toMatchObject({
    status: "fail",
    fix: expect.stringContaining("FABRIC_1.10"),
  });
});

test("a damaged file warns even when nobody chose it", () => {
  expect(check(said("libplugin_LIBFABRIC.so: file too short"))).toMatchObject({
    status: "warn",
    found: expect.stringContaining("damaged"),
  });
  expect(check({ kind: "died", how: "SIGBUS", output: "" }, true)).toMatchObject({
    status: "fail",
    found: expect.stringContaining("SIGBUS"),
  });
});
