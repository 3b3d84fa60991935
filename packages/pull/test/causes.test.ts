import { itNamesTheCause } from "@kv/testing/scenarios/causes";
import { createScenario } from "@kv/testing/scenarios/scenario";
import { expect, it } from "vitest";
import { pullConnector } from "../src/index.js";

itNamesTheCause(pullConnector, ["engine p", "the engine of this request"]);

it("H5: without kv_peer, D's own id shows nothing, and P is freed", async () => {
  await using play = createScenario();
  const { p, d } = await play.pair();
  const { kv_peer: _, ...params } = await play.prefilled(p);
  expect(await play.decoded(d, params)).toBe("KV_REQUEST_INVALID");
  await play.frees(p);
});

it.each([
  ["registration number", { remote_registration_generation: 7 }],
  ["request id", { remote_request_id: "r2" }],
])(
  "H7: a vLLM P's blocks that were read are not read again under another %s",
  async (_, forged) => {
    await using play = createScenario();
    const { p, d } = await play.pair({ plain: true });
    const params = await play.prefilled(p);
    expect(await play.decoded(d, params)).toBe("ok");
    await play.clock.advance(50);
    expect(await play.decoded(d, { ...params, ...forged }, 1, { requestId: "again" })).toBe(
      "KV_REFERENCE_USED",
    );
  },
);
