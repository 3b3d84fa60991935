import { KvError } from "@kv/interface";
import { isLongRun } from "@kv/testing/long-run";
import fc from "fast-check";
import { expect, test } from "vitest";
import { proveEnginePlans } from "../../src/prove/index.js";
import { groupKvHeadsOf } from "../bytes/kind-memory.js";
import {
  buildKinds,
  type KindScene,
  kindScene,
  moveKinds,
  requestOfKinds,
} from "../bytes/kind-scenes.js";
import { PROPERTY_TIMEOUT_MS } from "../property-timeout.js";
import { anyScene, likelyScene, tableTokens } from "./proof-scenes.js";

const timeout = { timeout: PROPERTY_TIMEOUT_MS };
const RUNS = isLongRun ? 1000 : 200;
const REFUSALS = [
  "KV_TOPOLOGY_INVALID",
  "KV_PLAN_INVALID",
  "KV_PLAN_INCOMPATIBLE",
  "KV_PLAN_UNSUPPORTED",
];

interface Counts {
  proven: number;
  refused: number;
}

/**
 * Whether the planner takes the pair. What it plans is proven and moves the right bytes; a refusal
 * has a reason.
 */
function isProven(scene: KindScene, counts: Counts): boolean {
  let built: ReturnType<typeof buildKinds>;
  try {
    built = buildKinds(scene);
  } catch (error) {
    if (!KvError.is(error) || !REFUSALS.includes(error.code)) throw error;
    counts.refused += 1;
    return false;
  }
  // The sample requests take longer, so only some scenes use them.
  const own = { requests: [{ blocks: requestOfKinds(scene) }] };
  for (const requests of scene.seed % 10 === 0 ? [own, {}] : [own]) {
    const verdict = proveEnginePlans(built.plans, {
      remotes: built.remotes,
      numKvHeads: scene.numKvHeads,
      ...groupKvHeadsOf(scene.caches, scene.groups),
      ...requests,
    });
    if (!verdict.proven)
      expect.fail(
        `${verdict.fault.kind}: ${verdict.fault.message} ${JSON.stringify(verdict.fault.at)}`,
      );
  }
  moveKinds(scene);
  counts.proven += 1;
  return true;
}

/**
 * What P cannot do though D can: put blocks in its order, as its conversions need not be those of
 * D, and have larger DCP groups than D where D's are smaller than its engine.
 */
const ONE_WAY =
  /^(blocks must be put in another order, and neither form can|a DCP group that is larger)/;

/**
 * The scene of the next turn: P reads what D has, with as much in its own prefix cache as D had.
 */
function nextTurn(scene: KindScene): KindScene {
  const { prefill: decode, decode: prefill, numTokens, computedBlocks } = scene;
  const most = Math.ceil(numTokens / tableTokens(decode)) - 1;
  return {
    ...scene,
    prefill,
    decode,
    computedBlocks: scene.groups.map((_, group) =>
      Math.min(
        typeof computedBlocks === "number" ? computedBlocks : (computedBlocks[group] ?? 0),
        most,
      ),
    ),
    form: undefined,
  };
}

// `least`: a planner that refuses every pair would pass otherwise. `times`: of other engines, in 100
// runs, two refusals instead of one are chance.
test.each([
  ["attention", likelyScene, RUNS, { least: 1 / 3, times: 20 }],
  ["all other kinds", kindScene, RUNS / 2, { least: 1 / 3, times: isLongRun ? 20 : 8 }],
  ["attention of any sizes", anyScene, RUNS, { least: 0, times: 0 }],
])(
  "every accepted pair is proven, with sample requests too, and moves the right bytes; so is the way back from D to P, unless P's order of blocks or D's DCP group is refused: %s",
  timeout,
  (_, drawn, numRuns, { least, times }) => {
    const [there, back] = [0, 1].map(() => ({ proven: 0, refused: 0 })) as [Counts, Counts];
    fc.assert(
      fc.property(drawn, (scene) => {
        // These do not read: an engine of pipeline stages, and rows of several layers from blocks
        // of one layer.
        const { stages, packed } = scene.prefill;
        if (!isProven(scene, there) || stages !== undefined || packed === true) return;
        const turn = nextTurn(scene);
        if (!isProven(turn, back)) expect(() => buildKinds(turn)).toThrow(ONE_WAY);
      }),
      { numRuns },
    );
    expect(there.proven).toBeGreaterThan(least * there.refused);
    expect(back.proven).toBeGreaterThan(times * back.refused);
  },
);

/** What each stage of a P that pushes plans and writes: the scene with the stage's layers alone. */
function stagesOf(scene: KindScene, stages: number): KindScene[] {
  const { caches, groups, computedBlocks } = scene;
  const each = Math.ceil(caches.length / stages);
  return Array.from({ length: Math.ceil(caches.length / each) }, (_, stage) => {
    const own = caches.slice(stage * each, (stage + 1) * each);
    const named = [...groups.keys()].filter((group) =>
      own.some((cache) => cache.groups.includes(group)),
    );
    const of = <T>(values: readonly T[]) => named.map((group) => values[group] as T);
    return {
      ...scene,
      groups: of(groups),
      caches: own.map((cache) => ({
        ...cache,
        groups: cache.groups.map((group) => named.indexOf(group)),
      })),
      computedBlocks: typeof computedBlocks === "number" ? computedBlocks : of(computedBlocks),
    };
  });
}

test(
  "each stage of a P that pushes: its layers alone are proven, whatever groups they are of",
  timeout,
  () => {
    const counts = { proven: 0, refused: 0 };
    fc.assert(
      fc.property(likelyScene, fc.constantFrom(1, 2, 3), (scene, stages) => {
        for (const stage of stagesOf(scene, stages)) isProven(stage, counts);
      }),
      { numRuns: RUNS / 4 },
    );
    expect(counts.proven).toBeGreaterThan(counts.refused / 3);
  },
);

test("proves a padded page of one head across layouts", () => {
  const engine = { tpSize: 1, kernelTokens: 8, perLogical: 3, logicalBlocks: 150, padding: 0 };
  const scene: KindScene = {
    groups: ["mla", "mamba"],
    caches: [{ name: "layer.0", groups: [0, 1], state: { projections: [64], recurrent: 64 } }],
    numKvHeads: 4,
    numTokens: 1,
    computedBlocks: 0,
    windowBlocks: 1,
    states: 1,
    seed: 0,
    prefill: { ...engine, layout: "LBNHC" },
    decode: { ...engine, layout: "LBHNC" },
    form: undefined,
  };
  expect(isProven(scene, { proven: 0, refused: 0 })).toBe(true);
});
