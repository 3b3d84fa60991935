import { KvError } from "@kv/interface";
import { isLongRun } from "@kv/testing/long-run";
import fc from "fast-check";
import { expect, test } from "vitest";
import { proveEnginePlans } from "../../src/prove/index.js";
import { groupKvHeadsOf } from "../bytes/kind-memory.js";
import { buildKinds, type KindScene, kindScene, requestOfKinds } from "../bytes/kind-scenes.js";
import { PROPERTY_TIMEOUT_MS } from "../property-timeout.js";

const REFUSALS = [
  "KV_TOPOLOGY_INVALID",
  "KV_PLAN_INVALID",
  "KV_PLAN_INCOMPATIBLE",
  "KV_PLAN_UNSUPPORTED",
];

function prove(scene: KindScene, counts: { proven: number; refused: number }): void {
  let built: ReturnType<typeof buildKinds>;
  try {
    built = buildKinds(scene);
  } catch (error) {
    if (!KvError.is(error) || !REFUSALS.includes(error.code)) throw error;
    counts.refused += 1;
    return;
  }
  const verdict = proveEnginePlans(built.plans, {
    remotes: built.remotes,
    numKvHeads: scene.numKvHeads,
    ...groupKvHeadsOf(scene.caches, scene.groups),
    requests: [{ blocks: requestOfKinds(scene) }],
  });
  if (!verdict.proven)
    expect.fail(
      `${verdict.fault.kind}: ${verdict.fault.message} ${JSON.stringify(verdict.fault.at)}`,
    );
  counts.proven += 1;
}

test("proves every plan for state, MLA, windows, packed rows, stages, DCP and memory types", {
  timeout: PROPERTY_TIMEOUT_MS,
}, () => {
  const counts = { proven: 0, refused: 0 };
  fc.assert(
    fc.property(kindScene, (scene) => prove(scene, counts)),
    { numRuns: isLongRun ? 500 : 100 },
  );
  expect(counts.proven).toBeGreaterThan(counts.refused / 3);
});

/**
 * What P cannot do though D can: put blocks in its order, as its conversions need not be those of
 * D, and have larger DCP groups than D where D's are smaller than its engine.
 */
const ONE_WAY =
  /^(blocks must be put in another order, and neither form can|a DCP group that is larger)/;

test("a pair of such engines that has a plan has one for the way back, which is proven, or P's order of blocks or D's DCP group is refused", {
  timeout: PROPERTY_TIMEOUT_MS,
}, () => {
  const [there, back] = [
    { proven: 0, refused: 0 },
    { proven: 0, refused: 0 },
  ];
  fc.assert(
    fc.property(kindScene, (scene) => {
      // These do not read: an engine of pipeline stages, and rows of several layers from blocks of
      // one layer.
      const { stages, packed } = scene.prefill;
      if (stages !== undefined || packed === true) return;
      const before = there.proven;
      prove(scene, there);
      if (there.proven === before) return;
      const { prefill: reader, decode: remote, numTokens } = scene;
      const { kernelTokens, perLogical, dcpSize = 1 } = reader;
      const blocks = Math.ceil(numTokens / (kernelTokens * perLogical * dcpSize));
      const computedBlocks = Math.min(scene.computedBlocks, blocks - 1);
      const turn = { ...scene, prefill: remote, decode: reader, computedBlocks, form: undefined };
      const { refused } = back;
      prove(turn, back);
      if (back.refused > refused) expect(() => buildKinds(turn)).toThrow(ONE_WAY);
    }),
    { numRuns: isLongRun ? 500 : 100 },
  );
  // In 100 runs two refusals instead of one are chance.
  expect(back.proven).toBeGreaterThan((isLongRun ? 20 : 8) * back.refused);
});

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
  const counts = { proven: 0, refused: 0 };
  prove(scene, counts);
  expect(counts).toEqual({ proven: 1, refused: 0 });
});
