import { describe, expect, test } from "vitest";
import { bundledChild } from "../support/bundled-child.js";
import { FAKE_NIXL, fakeMissing } from "../support/fake-nixl.js";

const child = await bundledChild("row-takeover.ts");

describe.skipIf(fakeMissing)(`tables that were taken over (${fakeMissing ?? "stand-in found"})`, () => {
  test("are not read once their environment has gone, also by a thread that was not waited for", async () => {
    const end = await child([], { FAKE_NIXL, FAKE_NIXL_STALL_METADATA: "2500" });
    expect(end, end.stderr).toMatchObject({ code: 0, signal: null, stdout: "terminated" });
  });
});
