import { KvError } from "@kv/interface";
import fc from "fast-check";
import { expect, test } from "vitest";
import { proveEnginePlans } from "../src/index.js";
import { buildKinds, kindScene, requestOfKinds } from "./kind-scenes.js";

const REFUSALS = ["KV_TOPOLOGY_INVALID", "KV_PLAN_INVALID", "KV_PLAN_INCOMPATIBLE", "KV_PLAN_UNSUPPORTED"];

test("state, latents, windows, packed rows, stages, DCP, types of memory: what is planned is proven", {
  timeout: 300_000,
}, () => {
  const counts = { proven: 0, refused: 0 };
  fc.assert(
    fc.property(kindScene, (scene) => {
      let built: ReturnType<typeof buildKinds>;
      try {
        built = buildKinds(scene);
        const verdict = proveEnginePlans(built.plans, {
          remotes: built.prefill,
          numKvHeads: scene.numKvHeads,
          requests: [{ blocks: requestOfKinds(scene) }],
        });
        if (!verdict.proven)
          expect.fail(`${verdict.fault.kind}: ${verdict.fault.message} ${JSON.stringify(verdict.fault.at)}`);
        counts.proven += 1;
      } catch (error) {
        if (!KvError.is(error) || !REFUSALS.includes(error.code)) throw error;
        counts.refused += 1;
      }
    }),
    { numRuns: 500 },
  );
  expect(counts.proven).toBeGreaterThan(counts.refused / 3);
});
