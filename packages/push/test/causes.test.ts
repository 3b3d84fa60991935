import { itNamesTheCause } from "@kv/testing/scenarios/causes";
import { createScenario } from "@kv/testing/scenarios/scenario";
import { expect, it } from "vitest";
import { pushConnector } from "../src/index.js";

itNamesTheCause(pushConnector, ["the prefill worker's engine", "the decode worker's engine"]);

it("H5: without kv_peer, P finds the request that D's own id shows", async () => {
  await using play = createScenario({ connector: pushConnector });
  const { p, d } = await play.pair();
  const { kv_peer: _, ...params } = await play.prefilled(p);
  expect(await play.decoded(d, params)).toBe("ok");
});
