import { createScenario as createAnyScenario, prompt } from "@kv/testing/scenarios/scenario";
import { coordinatesOf } from "@kv/testing/simulator/sim-engine";
import { describe, expect, it } from "vitest";
import { pushConnector } from "../src/index.js";

// vLLM's main pairs push legs by `transfer_id`, which the front end puts into both. 0.33 compares
// request ids only.

describe("transfer_id", () => {
  it.each(["prefill first", "decode first"])(
    "pairs legs whose request ids share nothing: %s",
    async (order) => {
      await using play = createAnyScenario({ connector: pushConnector });
      const { p, d } = await play.pair();
      const params = { ...coordinatesOf(p, "unknown"), transfer_id: "t-1" };
      const prefill = () =>
        play.clock.settle(
          p.prefill({ ...prompt(1), requestId: "p-names-it-so", params: { transfer_id: "t-1" } }),
        );
      if (order === "prefill first") await prefill();
      const decoded = d.decode({ ...prompt(1), requestId: "d-names-it-so", params });
      if (order === "decode first") {
        await play.clock.advance(100);
        expect(await prefill()).toMatchObject({ transfer_id: "t-1" });
      }
      expect(await play.outcome(decoded)).toBe("ok");
    },
  );

  it("comes before the request id: two prompts under one id, each leg gets its own", async () => {
    await using play = createAnyScenario({ connector: pushConnector });
    // A plain peer's registration names no prompt, so the ids alone decide.
    const { p, d } = await play.pair({ plain: true }, { plain: true });
    const legs = [1, 2].map((n) => ({
      produced: {
        ...prompt(n),
        requestId: `cmpl-x-0-0000000${n}`,
        params: { transfer_id: `t-${n}` },
      },
      consumed: {
        ...prompt(n),
        requestId: `cmpl-x-0-bbbb000${n}`,
        params: { ...coordinatesOf(p, "x"), transfer_id: `t-${n}` },
      },
    }));
    for (const { produced } of legs) await play.prefilled(p, 1, produced);
    // The second one registers first.
    for (const { consumed } of legs.reverse())
      expect(await play.outcome(d.decode(consumed))).toBe("ok");
  });

  it("of another prompt does not match an equal request id; where one leg has none, the ids decide", async () => {
    await using play = createAnyScenario({ connector: pushConnector });
    const { p, d } = await play.pair({}, { extra: { push_registration_timeout: 5 } });
    const same = prompt(1);
    await play.clock.settle(p.prefill({ ...same, params: { transfer_id: "t-1" } }));
    const other = { ...same, params: { ...coordinatesOf(p, "r1"), transfer_id: "t-2" } };
    expect(await play.outcome(d.decode(other))).toBe("KV_REQUEST_TIMEOUT");
    expect(await play.decoded(d, coordinatesOf(p, "r1"), 1, same)).toBe("ok");
  });

  it("that is no text is refused by name, at P and at D", async () => {
    await using play = createAnyScenario({ connector: pushConnector });
    const { p, d } = await play.pair();
    const prefill = p.prefill({ ...prompt(1), params: { transfer_id: 7 } });
    expect(await play.outcome(prefill)).toBe("KV_REQUEST_INVALID");
    const params = { ...coordinatesOf(p, "r1"), transfer_id: "" };
    expect(await play.decoded(d, params)).toBe("KV_REQUEST_INVALID");
  });
});
