import { heartbeats, itKeepsLeasesOfSixSeconds } from "@kv/testing/scenarios/lease-settings";
import { createScenario as createAnyScenario, prompt } from "@kv/testing/scenarios/scenario";
import { coordinatesOf } from "@kv/testing/simulator/sim-engine";
import type { FaultRule } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { pushConnector } from "../src/index.js";

// What a caller passes on: each setting changes what happens between two engines.

const createScenario = (faults: readonly FaultRule[] = []) =>
  createAnyScenario({ faults, connector: pushConnector });

/** How a request ends, and after how many seconds. */
async function ended(play: ReturnType<typeof createScenario>, work: Promise<unknown>) {
  const startedMs = play.clock.now();
  const reason = work.then(
    () => "",
    (error: Error) => error.message,
  );
  const outcome = await play.outcome(work);
  return {
    outcome,
    reason: await reason,
    seconds: Math.floor((play.clock.now() - startedMs) / 1000),
  };
}

describe("push_registration_timeout", () => {
  it.each([
    ["d", /5000 ms/],
    // P's notice ends a request whose D would wait for longer.
    ["p", /engine p does not write .*: the prompt did not reach the prefill worker in time/],
  ])("of %s ends a registration whose prompt does not come", async (host, reason) => {
    await using play = createScenario();
    const options = (name: string) =>
      name === host ? { extra: { push_registration_timeout: 5 } } : {};
    const p = await play.engine("p", options("p"));
    const d = await play.engine("d", options("d"));
    const outcome = await ended(play, d.decode({ ...prompt(1), params: coordinatesOf(p, "r1") }));
    expect(outcome).toMatchObject({ outcome: "KV_REQUEST_TIMEOUT", seconds: 5 });
    expect(outcome.reason).toMatch(reason);
    await play.clock.advance(2000);
    expect(d.outstanding().blocks).toBe(0);
  });

  it("is 480 s at a plain vLLM P by default, as in 0.33: a prompt that waits in P's queue for 300 s still arrives", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair({ plain: true });
    const work = d.decode({ ...prompt(1), params: coordinatesOf(p, "r1") });
    await play.clock.advance(300_000);
    await play.prefilled(p);
    expect(await play.outcome(work)).toBe("ok");
    const outcome = await ended(play, d.decode({ ...prompt(2), params: coordinatesOf(p, "r2") }));
    expect(outcome).toMatchObject({ outcome: "KV_REQUEST_TIMEOUT", seconds: 480 });
    // D keeps the blocks for another 480 s: that P may still write to them.
    await play.clock.advance(500_000);
  });

  it("H1: is request_timeout, 60 s, at a vLLM P that has answered and then refuses in silence; its blocks are out of use for 480 s in all", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair(
      { plain: true, model: "another" },
      { extra: { enforce_handshake_compat: false } },
    );
    const params = await play.prefilled(p);
    const outcome = await ended(play, d.decode({ ...prompt(1), params }));
    expect(outcome).toMatchObject({ outcome: "KV_REQUEST_TIMEOUT", seconds: 60 });
    await play.clock.advance(415_000);
    expect(d.outstanding().blocks).toBe(3);
    await play.clock.advance(6000);
    expect(d.outstanding().blocks).toBe(0);
  });

  it("is 60 s at a P of @kv by default", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair();
    const outcome = await ended(play, d.decode({ ...prompt(1), params: coordinatesOf(p, "r1") }));
    expect(outcome).toMatchObject({ outcome: "KV_REQUEST_TIMEOUT", seconds: 60 });
  });
});

it("enable_permute_local_kv warns: push converts without it", async () => {
  await using play = createScenario();
  await play.engine("d", { permutesLocalKv: true });
  await play.engine("p");
  const warned = (host: string) => play.logged(host, "setting-not-used");
  expect([warned("d"), warned("p")]).toMatchObject([[{ key: "enable_permute_local_kv" }], []]);
});

it("request_timeout of P ends a WRITE that does not end", async () => {
  await using play = createScenario([{ fault: "drop", operation: "WRITE", times: 1 }]);
  const { p, d } = await play.pair({ extra: { request_timeout: 5 } });
  const params = await play.prefilled(p);
  const outcome = await ended(play, d.decode({ ...prompt(1), params }));
  expect(outcome).toMatchObject({ outcome: "KV_TRANSFER_TIMEOUT", seconds: 5 });
  expect(outcome.reason).toContain("was not written to engine d within 5000 ms");
});

itKeepsLeasesOfSixSeconds(pushConnector);

describe("kv_lease_duration of 6 s", () => {
  const extra = { kv_lease_duration: 6 };

  it("of D is six times the time between its heartbeats", async () => {
    const { rule, sent } = heartbeats();
    await using play = createScenario([rule]);
    const { p, d } = await play.pair({}, { extra });
    const work = d.decode({ ...prompt(1), params: coordinatesOf(p, "r1") });
    await play.clock.advance(10_500);
    expect(sent()).toBe(10);
    await play.prefilled(p);
    expect(await play.outcome(work)).toBe("ok");
  });
});

it("engine_ttl of P closes an unused consumer", async () => {
  await using play = createScenario();
  const { p, d } = await play.pair({ extra: { engine_ttl: 50 } });
  expect(await play.handedOver(p, d)).toBe("ok");
  await play.clock.advance(49_000);
  expect(play.logged("p", "peer-dropped")).toEqual([]);
  await play.clock.advance(2000);
  expect(play.logged("p", "peer-dropped")).toMatchObject([{ engineId: "d" }]);
  expect(await play.handedOver(p, d, 2)).toBe("ok");
});

it.each([
  [{}, "ok"],
  [{ require_kv_peer: true }, "KV_REQUEST_TIMEOUT"],
])("a registration of a plain vLLM consumer at a P with %j: %s", async (extra, outcome) => {
  await using play = createScenario();
  const { p, d } = await play.pair(
    { plain: true, extra },
    {
      plain: true,
      extra: { push_registration_timeout: 5, decoder_kv_blocks_ttl: 5 },
    },
  );
  expect(await play.handedOver(p, d)).toBe(outcome);
});

it("a heartbeat that a vLLM producer gets makes up for one that it did not get", async () => {
  // Every other one is lost. Two in a row would mean that P has gone.
  const { rule, sent } = heartbeats((n) => n % 2 === 1);
  await using play = createScenario([rule]);
  const { p, d } = await play.pair({ plain: true }, { extra: { kv_lease_duration: 6 } });
  const work = d.decode({ ...prompt(1), params: coordinatesOf(p, "r1") });
  await play.clock.advance(6500);
  expect(sent()).toBe(6);
  await play.prefilled(p);
  expect(await play.outcome(work)).toBe("ok");
});

it("bidirectional_kv_xfer is refused with the reason, as in vLLM", async () => {
  const play = createScenario();
  await expect(play.engine("p", { extra: { bidirectional_kv_xfer: true } })).rejects.toMatchObject({
    code: "KV_CONFIG_INVALID",
    message: expect.stringContaining("with push nobody reads KV") as string,
  });
});
