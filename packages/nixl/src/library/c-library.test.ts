import { afterEach, describe, expect, test, vi } from "vitest";
import { cLibraryProblem, glibcVersion } from "./c-library.js";

afterEach(() => vi.restoreAllMocks());

describe("the C library", () => {
  test.each(["2.28", "2.36", "3.0"])("glibc %s is enough", (version) => {
    expect(cLibraryProblem("linux", version)).toBeUndefined();
  });

  const NEWER = "glibc 2.28 or newer: Debian 10, Ubuntu 20.04, RHEL 8";
  test.each([
    ["linux", "2.17", "glibc 2.17", NEWER],
    ["linux", "2.27", "glibc 2.27", NEWER],
    ["linux", "1.99", "glibc 1.99", NEWER],
    // Not a package that would not load either.
    ["linux", undefined, "musl", "node:22-bookworm; or @kv/transport-memory"],
    ["darwin", undefined, "darwin: NIXL runs on Linux", "@kv/transport-memory"],
  ])("%s with glibc %s is refused: %s", (platform, version, found, fix) => {
    const problem = cLibraryProblem(platform, version);
    expect(problem?.found).toContain(found);
    expect(problem?.fix).toContain(fix);
    expect(problem?.fix).not.toContain("@kv/nixl-");
  });

  test.runIf(process.platform === "linux")(
    "this machine's version is read from Node's report",
    () => {
      expect(glibcVersion()).toMatch(/^2\.\d+$/);
    },
  );

  test.runIf(process.platform === "linux")(
    "Node's report is made without the names of connections",
    () => {
      const report: typeof process.report & { excludeNetwork?: boolean } = process.report;
      const excluded: unknown[] = [];
      vi.spyOn(report, "getReport").mockImplementation(() => {
        excluded.push(report.excludeNetwork);
        throw new Error("no report");
      });
      expect(() => glibcVersion()).toThrow("no report");
      expect(excluded).toEqual([true]);
      expect(report.excludeNetwork).toBe(false);
    },
  );
});
