import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { playScene, sceneArbitrary } from "@kv/testing/isolation/isolation-scene";
import { isLongRun } from "@kv/testing/long-run";
import fc from "fast-check";
import { afterAll, describe, expect, it } from "vitest";
import { pushConnector } from "../src/index.js";

const folder = mkdtempSync(join(tmpdir(), "kv-isolation-"));
afterAll(() => rmSync(folder, { recursive: true }));
const keyFile = join(folder, "key");
writeFileSync(keyFile, "the key of the honest engines");

// `npm run test:long -- --only isolation-property` plays 10,000 scenes.
describe("no client and no stranger changes, frees or delays the request of another user", () => {
  it.each([
    ["without a key", { connector: pushConnector }],
    ["with a required key", { connector: pushConnector, keyFile }],
  ])("%s", { timeout: 3_600_000 }, async (_, options) => {
    await fc.assert(
      fc.asyncProperty(sceneArbitrary({ atOnce: true }), async (scene) => {
        expect(await playScene(scene, options)).toEqual([]);
      }),
      { numRuns: isLongRun ? 50 : 20 },
    );
  });
});

describe("the scenes find what gets through", () => {
  it.each(["capability", "secret", "prompt"] as const)(
    "without the check of the %s",
    async (takenOut) => {
      const scenes = fc.sample(sceneArbitrary(), { numRuns: 150, seed: 7 });
      const violation = /has wrong bytes|user \d+ ended with/;
      for (const scene of scenes) {
        const found = await playScene(scene, { connector: pushConnector, takenOut });
        if (violation.test(found.join("\n"))) return;
      }
      expect.fail(`no scene shows ${violation}`);
    },
  );
});
