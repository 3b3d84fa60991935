import { describe, expect, test } from "vitest";
import { nixlMissing } from "./require-nixl.js";
import { runChild } from "./run-child.js";

const names = nixlMissing ? [] : (JSON.parse((await runChild("traps.ts", ["list"])).stdout) as string[]);

describe.skipIf(nixlMissing)(`misuse ends in an error, not in a crash (${nixlMissing ?? "found"})`, () => {
  test("there are traps to try", () => expect(names.length).toBeGreaterThan(8));
  test.each(names)("%s", { timeout: 240_000 }, async (name) => {
    const end = await runChild("traps.ts", [name]);
    expect(end, end.stderr).toMatchObject({ code: 0, signal: null, stdout: "survived" });
  });
});
