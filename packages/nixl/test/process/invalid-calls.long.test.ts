// A long suite: calls that would end the process, each in one of its own.
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { describe, expect, test } from "vitest";
import { BOTH_BACKENDS } from "../support/both-backends.js";
import { runChild } from "../support/run-child.js";

const child = (name: string, backend: string) =>
  runChild("invalid-calls.ts", [name], { env: { NIXL_BACKEND: backend } });
const names: string[] = nixlMissing ? [] : JSON.parse((await child("list", "UCX")).stdout);

for (const { backend, missing } of BOTH_BACKENDS) {
  describe.skipIf(missing)(
    `invalid calls end in an error, not in a crash, over ${backend} (${missing ?? "found"})`,
    () => {
      test("there are calls to test", () => expect(names.length).toBeGreaterThan(6));
      test.each(names)("%s", { timeout: 240_000 }, async (name) => {
        const end = await child(name, backend);
        expect(end, end.stderr).toMatchObject({ code: 0, signal: null, stdout: "survived" });
      });
    },
  );
}
