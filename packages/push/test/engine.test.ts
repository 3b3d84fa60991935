import { engineSuite, playScene, type Scene } from "@kv/conformance/engine";
import { sceneOptions } from "@kv/testing/groups/group-tests";
import { expect, it } from "vitest";
import { pushConnector } from "../src/index.js";

// `npm run test:long -- --only engine` plays 10,000.
engineSuite({
  ...sceneOptions(pushConnector),
  name: "push",
  without: ["readback"],
  scenes: Number(process.env.KV_SCENES ?? 40),
});

const group = { blockTokens: 16, windowTokens: undefined, layers: 1 } as const;

it.each<[what: string, scene: Scene]>([
  [
    "one rank's release comes after another rank's next registration",
    {
      seed: 0,
      groups: [group],
      tp: [1, 2],
      requests: [
        { numTokens: 61, atMs: 26 },
        { numTokens: 2, atMs: 29, abortAfterMs: 2 },
        { numTokens: 2 },
      ],
    },
  ],
  [
    "a D of a model with states ends a request that it has not fetched",
    {
      seed: 254397717,
      groups: [group, { ...group, isState: true }],
      tp: [1, 1],
      requests: [{ numTokens: 2, isEarly: true, abortAfterMs: 2 }, { numTokens: 2 }],
    },
  ],
])("%s: P frees its blocks at once", async (_, scene) => {
  expect(await playScene(scene, sceneOptions(pushConnector))).toEqual([]);
});
