import { createScenario, prompt, started } from "@kv/testing/scenarios/scenario";
import { itSleepsAndWakes } from "@kv/testing/scenarios/sleep-mode";
import { expect, it } from "vitest";
import { pushConnector } from "../src/index.js";

itSleepsAndWakes(pushConnector, "WRITE");

it("layer-wise push: blocks of a prompt that ends because P sleeps are free when it is awake", async () => {
  await using play = createScenario({ connector: pushConnector });
  const p = await play.engine("p", { extra: { push_layerwise: true } });
  const work = started(p.prefill(prompt(1)));
  await play.clock.advance(3);
  expect(p.outstanding().requests).toBe(1);
  await play.clock.settle(p.sleep());
  expect(await play.outcome(work)).toBe("KV_REQUEST_ABORTED");
  expect(p.outstanding().kept).toBe(1);
  await play.clock.settle(p.wakeUp());
  await play.clock.advance(100);
  expect(p.outstanding()).toMatchObject({ kept: 0, blocks: 0 });
});
