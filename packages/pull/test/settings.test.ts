import { heartbeats, itKeepsLeasesOfSixSeconds } from "@kv/testing/scenarios/lease-settings";
import { createScenario, prompt, started } from "@kv/testing/scenarios/scenario";
import { describe, expect, it } from "vitest";
import { pullConnector } from "../src/index.js";

// What a caller passes on: each setting changes what happens between two engines.

itKeepsLeasesOfSixSeconds(pullConnector);

describe("kv_lease_duration of 6 s", () => {
  const extra = { kv_lease_duration: 6 };

  it("of D is six times the time between its heartbeats", async () => {
    const { rule, sent } = heartbeats();
    await using play = createScenario({
      faults: [rule, { fault: "delay", operation: "READ", delayMs: 10_500 }],
    });
    const { p, d } = await play.pair({ plain: true }, { extra });
    expect(await play.handedOver(p, d)).toBe("ok");
    expect(sent()).toBe(10);
  });

  // P's parameters have no end of the lease, as vLLM 0.33's have none: D counts a lease from when
  // it saw the request, and less a sixth.
  it.each([
    ["no heartbeat", 0, 4.8, "ok"],
    ["no heartbeat", 0, 5.2, "KV_LEASE_EXPIRED"],
    // Each heartbeat extends by two thirds: the one after 4 s until 8 s, less the same margin.
    ["the first four heartbeats", 4, 6.8, "ok"],
    ["the first four heartbeats", 4, 7.2, "KV_LEASE_EXPIRED"],
    ["all heartbeats", 100, 20, "ok"],
  ])(
    "of D: with %s (%i), a READ of %s s from a plain P ends with %s",
    async (_, taken, seconds, outcome) => {
      await using play = createScenario({
        faults: [
          heartbeats((n) => n > taken).rule,
          { fault: "delay", operation: "READ", delayMs: seconds * 1000 },
        ],
      });
      const { p, d } = await play.pair({ plain: true }, { extra });
      const params = {
        ...(await play.prefilled(p)),
        remote_blocks_expiry_time: null,
      };
      expect(await play.decoded(d, params)).toBe(outcome);
    },
  );
});

it("D waits for an answer to its lease query for 5 s, twice", async () => {
  await using play = createScenario();
  const { p, d } = await play.pair();
  expect(await play.handedOver(p, d)).toBe("ok");
  play.network.setFaults([{ fault: "drop", operation: "REQUEST", from: "d" }]);
  const startedMs = play.clock.now();
  expect(await play.handedOver(p, d, 2)).toBe("KV_SIDE_CHANNEL_UNREACHABLE");
  expect(Math.floor((play.clock.now() - startedMs) / 1000)).toBe(10);
});

it("push_layerwise has no effect on pull: an aborted prompt frees its blocks at once", async () => {
  await using play = createScenario();
  const p = await play.engine("p", { extra: { push_layerwise: true } });
  const work = started(p.prefill(prompt(1)));
  await play.clock.advance(3);
  expect(p.outstanding().blocks).toBe(3);
  p.abort("r1");
  expect([p.outstanding().kept, p.outstanding().blocks]).toEqual([0, 0]);
  expect(await play.outcome(work)).toBe("KV_REQUEST_ABORTED");
});
