import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { playScene, type SceneOptions } from "./engine/play-scene.js";
import { type SceneFeature, sceneArbitrary } from "./engine/scene.js";
import { SCENES_LIMIT_MS } from "./time-limits.js";

export type { NotificationFaults, SceneNetwork, SceneProcess } from "./engine/network.js";
export { playScene, type SceneOptions, type StageOptions } from "./engine/play-scene.js";
export type {
  BySide,
  Scene,
  SceneEvent,
  SceneFeature,
  SceneGroup,
  SceneRequest,
  SceneTurn,
} from "./engine/scene.js";
export type { CreateAggregator } from "./engine/steps.js";

/** Options of `engineSuite`. */
export interface EngineSuiteOptions extends SceneOptions {
  readonly name: string;
  /** What the connector refuses. @default nothing */
  readonly without?: readonly SceneFeature[] | undefined;
  /** @default 50 */
  readonly scenes?: number | undefined;
  /** Draws the scenes. @default another one in each run */
  readonly seed?: number | undefined;
}

/**
 * Plays random scenes of two engines of a connector: prompts of any length in random chunks, prefix
 * hits, preemption, aborts, groups, windows, states, staging, shared sequences, pipeline stages,
 * restarts under one engine id, sleep, turns that P reads back, and notifications that are lost,
 * doubled and reordered. Every byte is compared, and at the end nothing may be held. A failure
 * prints the seed and the smallest scene that fails, which `playScene` plays again.
 *
 *     import { engineSuite } from "@kv/conformance/engine";
 *     import { createWorkerOutputAggregator } from "@kv/connector";
 *     import { sceneNetwork } from "@kv/transport-memory";
 *     engineSuite({ name: "mine", connector, createNetwork: sceneNetwork, createWorkerOutputAggregator });
 */
export function engineSuite(options: EngineSuiteOptions): void {
  const { name, without = [], scenes = 50, seed, stage } = options;
  describe(`engines of ${name}`, () => {
    it(`in ${scenes} random scenes, every request ends, every byte is right and nothing is left`, {
      timeout: SCENES_LIMIT_MS,
    }, async () => {
      const arbitrary = sceneArbitrary(without, stage !== undefined);
      await fc.assert(
        fc.asyncProperty(arbitrary, async (scene) => {
          expect(await playScene(scene, options)).toEqual([]);
        }),
        { numRuns: scenes, ...(seed === undefined ? {} : { seed }) },
      );
    });
  });
}
