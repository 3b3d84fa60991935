import { afterEach, describe, expect, test, vi } from "vitest";
import { cLibraryProblem, glibcVersion } from "./c-library.js";

afterEach(() => vi.restoreAllMocks());

describe("the C library", () => {
  test.each(["2.28", "2.36", "3.0"])("glibc %s is enough", (version) => {
    expect(cLibraryProblem("linux", version)).toBeUndefined();
  });

  test("an older glibc is named, with systems that have a newer one", () => {
    const fix = expect.stringContaining("glibc 2.28 or newer: Debian 10, Ubuntu 20.04, RHEL 8");
    for (const version of ["2.17", "2.27", "1.99"]) {
      expect(cLibraryProblem("linux", version)).toEqual({ found: `glibc ${version}`, fix });
    }
  });

  test("musl is named, and the fix is not a package that would not load either", () => {
    const problem = cLibraryProblem("linux", undefined);
    expect(problem?.found).toContain("musl");
    expect(problem?.fix).toContain("node:22-bookworm");
    expect(problem?.fix).not.toContain("@kv/nixl-");
  });

  test("other systems than Linux are named", () => {
    expect(cLibraryProblem("darwin", undefined)?.found).toBe("darwin: NIXL runs on Linux");
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
