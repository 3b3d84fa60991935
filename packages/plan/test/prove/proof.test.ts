import { KvError } from "@kv/interface";
import { isLongRun } from "@kv/testing/long-run";
import fc from "fast-check";
import { expect, test } from "vitest";
import { proveEnginePlans } from "../../src/prove/index.js";
import { PROPERTY_TIMEOUT_MS } from "../property-timeout.js";
import {
  anyScene,
  type BuiltScene,
  build,
  likelyScene,
  logicalTokens,
  type Scene,
  sampleRequest,
  stagesOf,
} from "./proof-scenes.js";

const RUNS = isLongRun ? 1000 : 200;
const REFUSALS = [
  "KV_TOPOLOGY_INVALID",
  "KV_PLAN_INVALID",
  "KV_PLAN_INCOMPATIBLE",
  "KV_PLAN_UNSUPPORTED",
];

/** The plans, or undefined where the planner refuses the pair with a reason. */
function accepted(scene: Scene): BuiltScene | undefined {
  try {
    return build(scene);
  } catch (error) {
    if (KvError.is(error) && REFUSALS.includes(error.code)) return undefined;
    throw error;
  }
}

function check(scene: Scene, counts?: { proven: number; refused: number }): void {
  const built = accepted(scene);
  if (built === undefined) {
    if (counts !== undefined) counts.refused += 1;
    return;
  }
  const options = { remotes: built.prefill, numKvHeads: scene.numKvHeads };
  // The sample requests take longer, so only some scenes use them.
  const own = [{ blocks: sampleRequest(scene) }];
  for (const requests of scene.seed % 10 === 0 ? [own, undefined] : [own]) {
    const verdict = proveEnginePlans(built.plans, {
      ...options,
      ...(requests ? { requests } : {}),
    });
    if (!verdict.proven)
      expect.fail(
        `${verdict.fault.kind}: ${verdict.fault.message} ${JSON.stringify(verdict.fault.at)}`,
      );
  }
  if (counts !== undefined) counts.proven += 1;
}

test("proves every accepted pair, with its request and with sample requests", {
  timeout: PROPERTY_TIMEOUT_MS,
}, () => {
  const counts = { proven: 0, refused: 0 };
  fc.assert(
    fc.property(likelyScene, (scene) => check(scene, counts)),
    { numRuns: RUNS },
  );
  // Without this check, a planner that refuses every pair would pass.
  expect(counts.proven).toBeGreaterThan(counts.refused / 3);
});

/**
 * What P cannot do though D can: put blocks in its order, as its conversions need not be those of
 * D, and have larger DCP groups than D where D's are smaller than its engine.
 */
const ONE_WAY =
  /^(blocks must be put in another order, and neither form can|a DCP group that is larger)/;

/**
 * The scene of the next turn: P reads what D has, with as much in its own prefix cache as D had.
 */
function nextTurn(scene: Scene): Scene {
  const { prefill: decode, decode: prefill, numTokens, computedBlocks } = scene;
  const blocks = Math.ceil(numTokens / logicalTokens(decode));
  return {
    ...scene,
    prefill,
    decode,
    computedBlocks: computedBlocks.map((hit) => Math.min(hit, blocks - 1)),
  };
}

test("a pair that has a plan has one for the way back from D to P, which is proven, or P's order of blocks or D's DCP group is refused", {
  timeout: PROPERTY_TIMEOUT_MS,
}, () => {
  const counts = { proven: 0, refused: 0 };
  fc.assert(
    fc.property(likelyScene, (scene) => {
      if (accepted(scene) === undefined) return;
      const back = nextTurn(scene);
      const { refused } = counts;
      check(back, counts);
      if (counts.refused > refused) expect(() => build(back)).toThrow(ONE_WAY);
    }),
    { numRuns: RUNS },
  );
  expect(counts.proven).toBeGreaterThan(20 * counts.refused);
});

test("pairs of any sizes are proven, or refused with a reason", {
  timeout: PROPERTY_TIMEOUT_MS,
}, () => {
  fc.assert(
    fc.property(anyScene, (scene) => check(scene)),
    { numRuns: RUNS },
  );
});

test("each stage of a P that pushes: its layers alone are proven, whatever groups they are of", {
  timeout: PROPERTY_TIMEOUT_MS,
}, () => {
  const counts = { proven: 0, refused: 0 };
  fc.assert(
    fc.property(likelyScene, (scene) => {
      for (const stage of stagesOf(scene)) check(stage, counts);
    }),
    { numRuns: RUNS / 4 },
  );
  expect(counts.proven).toBeGreaterThan(counts.refused / 3);
});
