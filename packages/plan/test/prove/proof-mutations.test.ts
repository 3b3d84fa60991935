import { KvError } from "@kv/interface";
import { isLongRun } from "@kv/testing/long-run";
import fc from "fast-check";
import { describe, expect, test } from "vitest";
import { planRequest, type RequestBlocks } from "../../src/index.js";
import { proveEnginePlans } from "../../src/prove/index.js";
import { buildKinds, type KindScene, requestOfKinds } from "../bytes/kind-scenes.js";
import { type Case, MUTATIONS, type Mutation } from "./plan-mutations.js";
import { likelyScene } from "./proof-scenes.js";

// fc.sample does not apply the run factor of long runs.
const RUNS = (isLongRun ? 40 : 8) * Number(process.env["KV_PROPERTY_FACTOR"] ?? 1);

/** Some mutations apply to few of them. */
const SCENES = 1600 * Number(process.env["KV_PROPERTY_FACTOR"] ?? 1);

interface Sound {
  readonly scene: KindScene;
  readonly blocks: RequestBlocks;
  readonly remotes: ReturnType<typeof buildKinds>["remotes"];
  readonly sound: Case;
}

function soundCase(scene: KindScene): Sound | undefined {
  try {
    const { remotes, plans } = buildKinds(scene);
    const blocks = requestOfKinds(scene);
    return {
      scene,
      blocks,
      remotes,
      sound: { plans, requests: plans.map((plan) => planRequest(plan, blocks)) },
    };
  } catch (error) {
    if (KvError.is(error)) return undefined;
    throw error;
  }
}

function verdictOf({ scene, blocks, remotes }: Sound, { plans, requests }: Case) {
  return proveEnginePlans(plans, {
    remotes,
    numKvHeads: scene.numKvHeads,
    requests: [{ blocks, plans: requests }],
  });
}

const DRAWN = fc.sample(fc.tuple(likelyScene, fc.nat()), { numRuns: SCENES, seed: 7 });
const built: (readonly [given: Sound, seed: number] | undefined)[] = [];

/** The sound cases of the drawn scenes, each built when a mutation first needs it. */
function* soundCases() {
  for (const [at, [scene, seed]] of DRAWN.entries()) {
    if (at === built.length) {
      const given = soundCase(scene);
      built.push(given === undefined ? undefined : [given, seed]);
    }
    const known = built[at];
    if (known !== undefined) yield known;
  }
}

/** Takes scenes until the mutation applied to enough of them. */
function spoil(kinds: string, mutation: Mutation): number {
  let spoiled = 0;
  for (const [given, seed] of soundCases()) {
    if (spoiled >= RUNS) break;
    let state = seed >>> 0;
    const pick = (below: number) => {
      state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
      return Math.floor((state / 2 ** 32) * below);
    };
    const mutated = mutation(given.sound, pick);
    if (mutated === undefined) continue;
    spoiled += 1;
    let verdict = verdictOf(given, mutated);
    // The request has no descriptor of the changed row: the sample requests, which reach every row,
    // find it.
    if (verdict.proven && mutated.requests === given.sound.requests) {
      const { remotes, scene: model } = given;
      verdict = proveEnginePlans(mutated.plans, { remotes, numKvHeads: model.numKvHeads });
    }
    if (verdict.proven) expect.fail(`not found in ${JSON.stringify(given.scene)}, seed ${seed}`);
    expect(verdict.fault.message.length).toBeGreaterThan(20);
    expect(kinds.split("|")).toContain(verdict.fault.kind);
    expect(Object.keys(verdict.fault.at)).not.toEqual([]);
  }
  return spoiled;
}

describe("the proof finds the fault in a changed plan", () => {
  test.each(Object.entries(MUTATIONS))("%s", (_name, [kinds, mutation]) => {
    expect(spoil(kinds, mutation)).toBeGreaterThanOrEqual(Math.min(RUNS, 5));
  });
});
