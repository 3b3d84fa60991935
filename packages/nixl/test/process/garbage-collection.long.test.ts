// A long suite: waits for collections of garbage, in processes.
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { describe, expect, test } from "vitest";
import { runChild } from "../support/run-child.js";

describe.skipIf(nixlMissing)(`garbage collection (${nixlMissing ?? "found"})`, () => {
  test("keeps what is registered, prepared, in transfer or viewed, and collects everything else", async () => {
    const end = await runChild("garbage-collection.ts", [], { nodeOptions: ["--expose-gc"] });
    expect(end, end.stderr).toMatchObject({ code: 0, signal: null, stdout: "collected" });
  });
});
