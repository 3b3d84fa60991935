// A long suite: processes that must end in order, with what they print.
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { expect, test } from "vitest";
import { runChild } from "../support/run-child.js";

const CASES = [
  [
    "a copy does not end the process when its source moves away",
    fakeMissing,
    "copies.ts",
    "copied 3 to 3",
  ],
  [
    "tables of descriptors that were taken over are not read after their environment has ended, even by a thread that the end did not wait for",
    fakeMissing,
    "row-takeover.ts",
    "terminated",
  ],
  [
    "garbage collection keeps what is registered, prepared, in transfer or viewed, and collects everything else",
    nixlMissing,
    "garbage-collection.ts",
    "collected",
  ],
] as const;

for (const [name, missing, file, stdout] of CASES)
  test.skipIf(missing)(`${name} (${missing ?? "found"})`, async () => {
    const env = { FAKE_NIXL, FAKE_NIXL_STALL_METADATA: "2500" };
    const end = await runChild(file, [], { env, nodeOptions: ["--expose-gc"] });
    expect(end, end.stderr).toMatchObject({ code: 0, signal: null, stdout });
  });
