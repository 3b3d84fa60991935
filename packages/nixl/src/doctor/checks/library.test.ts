import { realpath, symlink } from "node:fs/promises";
import { join } from "node:path";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { describe, expect, test } from "vitest";
import { realHost } from "../../host.js";
import { findLibrary } from "../../library/find-library.js";
import { backendCheck, libraryCheck, repairChecks } from "./library.js";

const folder = scratchFolder();

const look = (path: string) =>
  libraryCheck(realHost(), { PATH: process.env.PATH, KV_NIXL_LIBRARY: path }, undefined);

describe.runIf(process.platform === "linux")("a file that KV_NIXL_LIBRARY names", () => {
  const fix = expect.stringContaining("set KV_NIXL_LIBRARY to a libnixl_capi.so of this machine");

  test("fails when it is not a library", async () => {
    const { check, located } = await look("/etc/passwd");
    expect(located).toBeUndefined();
    expect(check).toMatchObject({
      status: "fail",
      found: expect.stringMatching(
        /^not a library that loads on this machine: .*, from KV_NIXL_LIBRARY\n\/etc\/passwd$/s,
      ),
      fix,
    });
  });

  test("fails when it is another library", async () => {
    const shared = (process.report.getReport() as { sharedObjects: string[] }).sharedObjects;
    const libc = shared.find((path) => /\/libc\.so/.test(path)) ?? "";
    const { check, located } = await look(libc);
    expect(located).toBeUndefined();
    expect(check).toMatchObject({
      status: "fail",
      found: expect.stringContaining("not NIXL's"),
      fix,
    });
  });

  test.skipIf(nixlMissing)(
    "is ok when it is a link to NIXL, and the target is reported",
    async () => {
      const link = join(folder, "libnixl_capi.so");
      const real = await realpath(await findLibrary());
      await symlink(real, link);
      const { check, located } = await look(link);
      expect(located?.path).toBe(link);
      expect(check).toMatchObject({
        status: "ok",
        found: expect.stringContaining(`a link to ${real}`),
      });
    },
  );
});

test("a backend without peers is reported as storage only", () => {
  const value = { startMs: 1, memoryTypes: ["DRAM", "FILE"], metadataBytes: null };
  expect(backendCheck("POSIX", { kind: "answered", value, output: "" })).toMatchObject({
    status: "ok",
    found: expect.stringContaining("DRAM, FILE; storage only: it reaches no other agent"),
  });
});

test("F5: each repair is listed with its fault, and one that did not take hold is a warning", () => {
  const repairs = [
    ["ucx-listener", "holds", ""],
    ["ucx-lost-answers", "failed", "a table cannot be changed"],
    ["libfabric-endless-calls", "off", ""],
  ];
  const value = { startMs: 1, metadataBytes: 1, memoryTypes: [], repairs };
  const outcome = { kind: "answered", value, output: "" } as const;
  expect(repairChecks("UCX", outcome).map(({ status, found }) => `${status}: ${found}`)).toEqual([
    expect.stringMatching(/^ok: holds; UCX up to 1.23: its listener ends/),
    expect.stringMatching(/^warn: did not take hold: a table cannot be changed; a peer that dies/),
    expect.stringMatching(/^note: switched off by KV_NIXL_REPAIRS_OFF: /),
  ]);
  expect(
    repairChecks("UCX", {
      ...outcome,
      value: { ...value, repairs: [["ucx-listener", "waiting", ""]] },
    }),
  ).toEqual([]);
});
