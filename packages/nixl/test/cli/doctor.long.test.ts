// A long suite: runs kv-nixl doctor on machines of all kinds.
import { cp, realpath, truncate } from "node:fs/promises";
import { basename, dirname, join } from "node:path";
import { type Check, doctor, doctorText, findLibrary } from "@kv/nixl";
import { doctorReportSchema } from "@kv/nixl/reports";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { builtProgram } from "@kv/testing/node-programs";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { describe, expect, test } from "vitest";
import { run } from "../support/run-child.js";

const CLI = builtProgram("kv-nixl");
const WITHOUT_LIBRARY_PACKAGE = new URL("../support/without-library-package.mjs", import.meta.url)
  .href;
const byId = (checks: readonly Check[]) =>
  Object.fromEntries(checks.map((check) => [check.id, check]));
const empty = scratchFolder();

describe.skipIf(nixlMissing)(
  `doctor with NIXL installed (${nixlMissing ?? "found"})`,
  {
    timeout: 240_000,
  },
  () => {
    test("checks every part, and moves bytes between two processes", async () => {
      const report = doctorReportSchema.parse(await doctor());
      const checks = byId(report.checks);
      expect(report.checks.filter(({ status }) => status === "fail")).toEqual([]);
      for (const id of [
        "runtime.node",
        "runtime.libc",
        "runtime.addon",
        "library.path",
        "library.backend.UCX",
        "plugins.UCX",
      ]) {
        expect(checks[id], id).toMatchObject({ status: "ok" });
      }
      expect(checks["library.path"]?.details).toMatchObject({ path: await findLibrary() });
      expect(checks["library.backend.UCX"]?.found).toContain("DRAM");
      for (const operation of ["READ", "WRITE"]) {
        const pair = checks[`pair.UCX.${operation}`]?.details;
        expect(pair).toMatchObject({ consistent: true, protocols: [{ operation }] });
        expect(pair?.gigabytesPerSecond).toBeGreaterThan(0);
      }
      const text = doctorText(report);
      for (const { title } of report.checks) expect(text).toContain(title);
      expect(text.trimEnd().split("\n").at(-1)).toMatch(/^(ok|warn): /);
    });

    test("a backend that does not start: UCX's reason and the setting that selected it", async () => {
      const environment = { ...process.env, UCX_TLS: "foo", NIXL_BACKEND: "UCX" };
      const checks = byId((await doctor({ environment })).checks);
      expect(checks["variables.backend"]).toMatchObject({
        status: "note",
        found: "UCX, from NIXL_BACKEND",
      });
      const backend = checks["library.backend.UCX"];
      expect(backend).toMatchObject({
        status: "fail",
        found: expect.stringContaining("selected by NIXL_BACKEND"),
      });
      expect(backend?.found).toMatch(
        /\nits output ended with:\n.*transport 'foo' is not available, please use one or more of/,
      );
    });

    test("a storage backend: it starts, and the pair is not tested", async () => {
      const checks = byId((await doctor({ backends: ["POSIX"] })).checks);
      expect(checks["library.backend.POSIX"]).toMatchObject({
        status: "ok",
        details: { metadataBytes: null, memoryTypes: ["DRAM", "FILE"] },
      });
      const found = "not tested: storage only: it reaches no other agent";
      expect(checks["pair.POSIX"]).toMatchObject({ status: "note", found });
    });

    test("a truncated plugin is reported, and nothing crashes", async () => {
      const library = await brokenCopy(await findLibrary(), join(empty, "broken"));
      const report = await doctor({ library });
      const checks = byId(report.checks);
      expect(report.verdict).toBe("fail");
      expect(checks["library.path"]).toMatchObject({ status: "ok", details: { path: library } });
      expect(checks["plugins.UCX"]).toMatchObject({
        status: "fail",
        found: expect.stringMatching(/^is damaged: the loader (dies|ends) .*truncated/),
        fix: expect.stringContaining("kv-nixl install --force"),
      });
      expect(checks["plugins.POSIX"]).toMatchObject({ status: "ok" });
      for (const id of ["library.backend.UCX", "pair.UCX"]) {
        expect(checks[id]).toMatchObject({
          status: "note",
          found: "not tested: its plugin does not load",
        });
      }
    });
  },
);

describe("doctor without NIXL", () => {
  test("a KV_NIXL_LIBRARY that does not exist fails, and nothing else is tested", async () => {
    const file = join(empty, "libnixl_capi.so");
    const report = doctorReportSchema.parse(
      await doctor({ environment: { ...process.env, KV_NIXL_LIBRARY: file } }),
    );
    const checks = byId(report.checks);
    expect(report.checks.filter(({ status }) => status === "fail").map(({ id }) => id)).toEqual([
      "library.path",
    ]);
    expect(checks["library.path"]).toMatchObject({
      found: expect.stringContaining(file),
      fix: "npx --no-install kv-nixl install",
    });
    expect(checks["pair.UCX"]).toMatchObject({
      status: "note",
      found: "not tested: there is no NIXL that loads",
    });
  });

  test("the command with an empty cache lists each kind of place and the fix, and exits with 1", async () => {
    const environment = {
      HOME: empty,
      XDG_CACHE_HOME: empty,
      PATH: "",
      NIXL_BACKEND: "no backend!",
    };
    const args = ["--import", WITHOUT_LIBRARY_PACKAGE, CLI, "doctor"];
    const { code, stdout } = await run(args, { only: environment });
    expect(code).toBe(1);
    expect(stdout).toMatch(
      /fail {2}NIXL +NIXL \(libnixl_capi\.so\) was not found.*\[KV_LIBRARY_NOT_FOUND\]/,
    );
    expect(stdout).toContain(`kv-nixl install: ${empty}`);
    expect(stdout).toContain(`optional package: @kv/nixl-libs-linux-${process.arch}-gnu`);
    expect(stdout).toMatch(/the loader: .* and \d+ other places/);
    expect(stdout).toContain("fix: npm run kv-nixl -- install");
    expect(stdout).toMatch(
      /fail {2}selected backend +"no backend!" is not the name of a NIXL backend/,
    );
    expect(stdout.trimEnd().split("\n").at(-1)).toMatch(/^fail: 2 of \d+ checks failed; first: \S/);
  });
});

/** Copies the installation of a library and truncates its UCX plugin. */
async function brokenCopy(library: string, folder: string): Promise<string> {
  const from = dirname(await realpath(library));
  // Copies files, not links: NIXL would follow links to the plugins of the original.
  await cp(dirname(from), folder, { recursive: true });
  const to = join(folder, basename(from));
  await truncate(join(to, "plugins", "libplugin_UCX.so"), 30_000);
  return join(to, basename(library));
}
