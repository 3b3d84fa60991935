import { announcing } from "@kv/testing/scenarios/announced-metadata";
import { createScenario } from "@kv/testing/scenarios/scenario";
import { expect, it } from "vitest";
import { pullConnector } from "../src/index.js";

it("a producer with prefill context parallelism serves a D, as in vLLM 0.33", async () => {
  const play = createScenario({ connector: pullConnector });
  const p = await play.engine("p", { connector: announcing(pullConnector, { pcpSize: 2 }), tpSize: 2 });
  const d = await play.engine("d");
  expect(await play.handedOver(p, d)).toBe("ok");
  await play.end();
});

it("a state that is replicated on every rank (ple_block_len) is refused at the handshake, with the model's name", async () => {
  const play = createScenario({ connector: pullConnector });
  const connector = announcing(pullConnector, { pleBlockLengthBytes: 4096 });
  const p = await play.engine("p", { connector, model: "sim-ple" });
  const d = await play.engine("d", { model: "sim-ple" });
  expect(await play.handedOver(p, d)).toBe("KV_PLAN_UNSUPPORTED");
  expect(JSON.stringify(play.logged("d", "receive-failed"))).toMatch(
    /model sim-ple: engine p has a state .*ple_block_len/,
  );
  await play.end();
});
