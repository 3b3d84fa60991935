// A long suite: processes with two copies of the package.
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { describe, expect, test } from "vitest";
import { runChild } from "../support/run-child.js";

describe.skipIf(fakeMissing)(
  `copies do not end the process (${fakeMissing ?? "addon found"})`,
  () => {
    test.each([
      ["scatter", "copied 3 to 3"],
      ["gather", "KV_MEMORY_INVALID"],
      ["long", "0,7"],
    ])("%s", async (name, stdout) => {
      const options = { env: { FAKE_NIXL }, nodeOptions: ["--expose-gc"] };
      const end = await runChild("copies.ts", [name], options);
      expect(end, end.stderr).toMatchObject({ code: 0, signal: null, stdout });
    });
  },
);
