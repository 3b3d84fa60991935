import { engineSuite, playScene } from "@kv/conformance/engine";
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

it("one rank's release comes after another rank's next registration: P frees its blocks at once", async () => {
  const scene = {
    seed: 0,
    groups: [{ blockTokens: 16, windowTokens: undefined, layers: 1 }],
    tp: [1, 2],
    requests: [
      { numTokens: 61, atMs: 26 },
      { numTokens: 2, atMs: 29, abortAfterMs: 2 },
      { numTokens: 2 },
    ],
  } as const;
  expect(await playScene(scene, sceneOptions(pushConnector))).toEqual([]);
});
