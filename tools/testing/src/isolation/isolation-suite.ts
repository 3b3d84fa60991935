import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import fc from "fast-check";
import { afterAll, describe, expect, it } from "vitest";
import { isLongRun } from "../long-run.js";
import { playScene, type SceneOptions, sceneArbitrary } from "./isolation-scene.js";

/** A check that the scenes must miss, and what they then find. */
type Missed = readonly [takenOut: NonNullable<SceneOptions["takenOut"]>, violation: RegExp];

/** `npm run test:long -- --only isolation-property` plays 10,000 scenes. */
export function describeIsolation(
  options: SceneOptions,
  given: Parameters<typeof sceneArbitrary>[0],
  missed: { readonly scenes: number; readonly checks: readonly Missed[] },
): void {
  const folder = mkdtempSync(join(tmpdir(), "kv-isolation-"));
  afterAll(() => rmSync(folder, { recursive: true }));
  const keyFile = join(folder, "key");
  writeFileSync(keyFile, "the key of the honest engines");

  describe("no client and no stranger changes, frees or delays the request of another user", () => {
    it.each([
      ["without a key", options],
      ["with a required key", { ...options, keyFile }],
    ])("%s", { timeout: 3_600_000 }, async (_, played) => {
      await fc.assert(
        fc.asyncProperty(sceneArbitrary(given), async (scene) => {
          expect(await playScene(scene, played)).toEqual([]);
        }),
        { numRuns: isLongRun ? 50 : 20 },
      );
    });
  });

  describe("the scenes find what gets through", () => {
    it.each(missed.checks)("without the check of the %s", async (takenOut, violation) => {
      const scenes = fc.sample(sceneArbitrary(), { numRuns: missed.scenes, seed: 7 });
      for (const scene of scenes) {
        const found = await playScene(scene, { ...options, takenOut });
        if (violation.test(found.join("\n"))) return;
      }
      expect.fail(`no scene shows ${violation}`);
    });
  });
}
