// A long suite: waits for threads that have been left.
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { describe, expect, test } from "vitest";
import { bundledChild } from "../support/bundled-child.js";

const child = await bundledChild("row-takeover.ts");

describe.skipIf(fakeMissing)(
  `tables of descriptors that were taken over (${fakeMissing ?? "fake found"})`,
  () => {
    test("are not read after their environment has ended, even by a thread that the end did not wait for", async () => {
      const end = await child([], { FAKE_NIXL, FAKE_NIXL_STALL_METADATA: "2500" });
      expect(end, end.stderr).toMatchObject({ code: 0, signal: null, stdout: "terminated" });
    });
  },
);
