import { createScenario as createAnyScenario, prompt } from "@kv/testing/scenarios/scenario";
import { coordinatesOf } from "@kv/testing/simulator/sim-engine";
import { describe, expect, it } from "vitest";
import { pushConnector } from "../src/index.js";
import { decodeRequest, PREFILL, scheduler } from "./counterparts/scheduler-alone.js";

// What a caller passes on: each setting changes what happens between two engines.

const createScenario = () => createAnyScenario({ connector: pushConnector });

describe("push_registration_timeout", () => {
  it.each([
    ["d", /5000 ms/],
    // P's notice ends a request whose D would wait for longer.
    ["p", /engine p does not write .*: the prompt did not reach the prefill worker in time/],
  ])("of %s ends a registration whose prompt does not come", async (host, message) => {
    const play = createScenario();
    const options = (name: string) => (name === host ? { extra: { push_registration_timeout: 5 } } : {});
    const p = await play.engine("p", options("p"));
    const d = await play.engine("d", options("d"));
    const startedMs = play.clock.now();
    const work = d.decode({ ...prompt(1), params: coordinatesOf(p, "r1") });
    const reason = work.catch((error: Error) => error.message);
    expect(await play.outcome(work)).toBe("KV_REQUEST_TIMEOUT");
    expect(Math.floor((play.clock.now() - startedMs) / 1000)).toBe(5);
    expect(await reason).toMatch(message);
    await play.clock.advance(2000);
    expect(d.outstanding().blocks).toBe(0);
    await play.end();
  });
});

describe("the scheduler has pending work", () => {
  it("when only a notice to P is left: a request that was refused", async () => {
    const { made, step } = await scheduler();
    const request = decodeRequest("d1", { ...PREFILL, remote_block_ids: "no" });
    expect(() => made.matchedTokens(request, 0)).toThrow(/remote_block_ids/);
    expect(made.hasPendingWork()).toBe(true);
    expect(step()).toMatchObject({ registrations: [{ requestId: "d1", isAwaited: false }], heartbeats: [] });
    expect(made.hasPendingWork()).toBe(false);
  });
});
