import { describe, expect, test } from "vitest";
import { nixlMissing } from "../support/nixl-available.js";
import { runChild } from "../support/run-child.js";

describe.skipIf(nixlMissing)(`copies of the package in one process (${nixlMissing ?? "found"})`, () => {
  test("agents of two copies reach each other, and the process ends", { timeout: 240_000 }, async () => {
    const end = await runChild("two-package-copies.ts");
    expect(end, end.stderr).toMatchObject({ code: 0, signal: null, stdout: "moved" });
  });
});
