import { itSharesSequences } from "@kv/testing/scenarios/context-parallel";
import { createScenario, prompt } from "@kv/testing/scenarios/scenario";
import { coordinatesOf } from "@kv/testing/simulator/sim-engine";
import { expect, it } from "vitest";
import { pushConnector } from "../src/index.js";

itSharesSequences(pushConnector);

const SHARED = { kind: "mla", numKvHeads: 1, tpSize: 2, dcpSize: 2 } as const;

it("both legs at once: D plans for P's share of the sequence before P has answered", async () => {
  await using play = createScenario({ connector: pushConnector });
  const { p, d } = await play.pair(SHARED, { ...SHARED, tpSize: 4, dcpSize: 4 });
  const params = { ...coordinatesOf(p, "r1"), dcp_size: 2 };
  const received = d.decode({ ...prompt(1, 150), params });
  await play.clock.settle(p.prefill(prompt(1, 150)));
  expect(await play.outcome(received)).toBe("ok");
});

it("both legs at once without P's dcp_size: D refuses by name, and neither side holds anything", async () => {
  await using play = createScenario({ connector: pushConnector });
  const { p, d } = await play.pair(SHARED, SHARED);
  const received = d.decode({ ...prompt(1, 150), params: coordinatesOf(p, "r1") });
  await play.clock.settle(p.prefill(prompt(1, 150)));
  expect(await play.outcome(received)).toBe("KV_PLAN_INCOMPATIBLE");
  await play.clock.advance(61_000);
});

it.each(["p", "d"] as const)(
  "vllm#56186: a plain vLLM peer of %s with DCP is refused, as vLLM 0.33 does",
  async (own) => {
    await using play = createScenario({ connector: pushConnector });
    const cache = { kind: "mla", numKvHeads: 1 } as const;
    const p = await play.engine("p", own === "p" ? SHARED : { ...cache, plain: true });
    const d = await play.engine("d", own === "d" ? SHARED : { ...cache, plain: true });
    expect(await play.handedOver(p, d)).toMatch(
      /^KV_(PLAN_UNSUPPORTED|REQUEST_TIMEOUT|TRANSFER_TIMEOUT)$/,
    );
    await play.clock.advance(600_000);
  },
);
