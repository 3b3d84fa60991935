import { multiConnector, registerConnector } from "@kv/connector";
import { createScenario, prompt } from "@kv/testing/scenarios/scenario";
import { coordinatesOf } from "@kv/testing/simulator/sim-engine";
import { expect, it } from "vitest";
import { pushConnector } from "../src/index.js";

// What a request gets from several connectors, and who loads it, is shown with pull
// (packages/pull/test/multi-connector.test.ts).
const PUSH = { kv_connector: "PushOfTheMultiConnectorTest", kv_role: "kv_both" };
registerConnector(PUSH.kv_connector, async () => pushConnector);

it("push within MultiConnector hands over, whichever leg comes first, and sleeps and wakes", async () => {
  await using play = createScenario({ connector: multiConnector });
  const extra = { connectors: [PUSH] };
  const { p, d } = await play.pair({ extra }, { extra });
  expect(await play.handedOver(p, d, 1)).toBe("ok");
  const received = d.decode({ ...prompt(2), params: coordinatesOf(p, "r2") });
  await play.clock.advance(20);
  await play.prefilled(p, 2);
  expect(await play.outcome(received)).toBe("ok");
  await play.clock.settle(p.sleep());
  await play.clock.settle(p.wakeUp());
  expect(await play.handedOver(p, d, 3)).toBe("ok");
});
