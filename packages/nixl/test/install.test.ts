import { mkdtemp, readdir, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { findLibrary, installNixl } from "@kv/nixl";
import { describe, expect, test } from "vitest";
import { nixlMissing } from "./require-nixl.js";

// The package index must answer; where NIXL is, it did.
describe.skipIf(nixlMissing)(`installing NIXL with pip (${nixlMissing ?? "found"})`, () => {
  test("two at once in an empty cache: both end with the same complete folder, and nothing else is left", async () => {
    const cache = await mkdtemp(join(tmpdir(), "kv-nixl-cache-"));
    try {
      const environment = { ...process.env, XDG_CACHE_HOME: cache };
      const [one, two] = await Promise.all([installNixl({ environment }), installNixl({ environment })]);
      expect(one.library).toBe(two.library);
      expect(await readdir(join(cache, "kv-nixl"))).toHaveLength(1);
      expect(await findLibrary({ environment: { HOME: cache, PATH: "", XDG_CACHE_HOME: cache } })).toBe(
        one.library,
      );
      expect((await installNixl({ environment })).existed).toBe(true);
    } finally {
      await rm(cache, { recursive: true, force: true });
    }
  });
});
