import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { describe, expect, test } from "vitest";
import { runChild } from "../support/run-child.js";

describe.skipIf(nixlMissing)(
  `two copies of the package in one process (${nixlMissing ?? "found"})`,
  () => {
    test("their agents reach each other, and the process exits", { timeout: 240_000 }, async () => {
      const end = await runChild("two-package-copies.ts");
      expect(end, end.stderr).toMatchObject({ code: 0, signal: null, stdout: "moved" });
    });
  },
);
