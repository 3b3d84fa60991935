import { itLandsEachLayer, LAYERS, STAGED } from "@kv/testing/scenarios/pipeline-stages";
import { createScenario } from "@kv/testing/scenarios/scenario";
import { describe, expect, it } from "vitest";
import { pushConnector } from "../src/index.js";

const scenario = () => createScenario({ connector: pushConnector });

describe.each([1, 2])("a producer with two pipeline stages and TP %i", (tpSize) => {
  it.each([1, 2])("writes each stage's layers into a D with TP %i", async (decodeTp) => {
    for (const plain of [false, true]) {
      const play = scenario();
      const { p, d } = await play.pair(
        { ...STAGED, tpSize, plain },
        { ...LAYERS, tpSize: decodeTp },
      );
      // A whole prompt, and one whose first blocks D has.
      for (const [index, cachedTokens] of [0, 16].entries())
        expect(await play.handedOver(p, d, index, { cachedTokens })).toBe("ok");
      await play.frees(p);
    }
  });

  itLandsEachLayer(pushConnector, tpSize);

  it("fails D's request when one WRITE of a stage fails, and frees its blocks", async () => {
    await using play = createScenario({
      connector: pushConnector,
      faults: [{ fault: "fail", operation: "WRITE", nth: 2 * tpSize }],
    });
    const { p, d } = await play.pair({ ...STAGED, tpSize }, LAYERS);
    expect(await play.handedOver(p, d)).toBe("KV_TRANSFER_FAILED");
    await play.clock.advance(61_000);
    expect(p.outstanding().kept).toBe(0);
  });
});

it.each([
  { kind: "mla", numKvHeads: 1 },
  { kind: "swa" },
  { kind: "full", blockSize: 32 },
] as const)(
  "%j: a D with other blocks and TP sizes gets the layers of both stages",
  async (cache) => {
    const play = scenario();
    const { p, d } = await play.pair(
      { ...STAGED, ...cache },
      { ...LAYERS, ...cache, blockSize: 16, tpSize: 2 },
    );
    expect(await play.handedOver(p, d)).toBe("ok");
    await play.frees(p);
  },
);

it("a kv_both engine with stages is refused as D", async () => {
  const play = scenario();
  const { p, d } = await play.pair(LAYERS, STAGED);
  expect(await play.handedOver(p, d)).toBe("KV_PLAN_UNSUPPORTED");
  await play.clock.advance(61_000);
});
