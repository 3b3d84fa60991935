import { describe, expect, test } from "vitest";
import { BOTH_BACKENDS } from "./both-backends.js";
import { nixlMissing } from "./require-nixl.js";
import { runChild } from "./run-child.js";

const names = nixlMissing ? [] : await namesOfTraps();

async function namesOfTraps(): Promise<string[]> {
  return JSON.parse((await runChild("traps.ts", ["list"], { env: { NIXL_BACKEND: "UCX" } })).stdout);
}

for (const { backend, missing } of BOTH_BACKENDS) {
  describe.skipIf(missing)(
    `misuse ends in an error, not in a crash, over ${backend} (${missing ?? "found"})`,
    () => {
      test("there are traps to try", () => expect(names.length).toBeGreaterThan(8));
      test.each(names)("%s", { timeout: 240_000 }, async (name) => {
        const end = await runChild("traps.ts", [name], { env: { NIXL_BACKEND: backend } });
        expect(end, end.stderr).toMatchObject({ code: 0, signal: null, stdout: "survived" });
      });
    },
  );
}
