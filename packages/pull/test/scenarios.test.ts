import { neverReleasing } from "@kv/testing/faults/sabotage";
import { createScenario, prompt, started } from "@kv/testing/scenarios/scenario";
import { describe, expect, it } from "vitest";
import { CLOSE_GRACE_MS } from "../../connector/src/peers/transfers.js";

const text = (payload: Uint8Array | undefined) => new TextDecoder().decode(payload);

describe("peers", () => {
  it("an unreachable peer is backed off, and used again once it is reachable", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair();
    const [first, second] = await play.clock.settle(
      Promise.all([p.prefill(prompt(1)), p.prefill(prompt(2))]),
    );
    await p.kill();
    expect(await play.decoded(d, first)).toBe("KV_SIDE_CHANNEL_UNREACHABLE");
    expect(await play.decoded(d, second, 2)).toBe("KV_HANDSHAKE_BACKED_OFF");
    const again = await play.engine("p");
    await play.clock.advance(60_000);
    expect(await play.handedOver(again, d, 3)).toBe("ok");
    expect(play.counted("d", "failedTransfers")).toBe(1);
  });

  it("a restarted peer with the same engine id is recognized by its parameters, and read from at once", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair();
    const params = await play.prefilled(p);
    expect(await play.decoded(d, params)).toBe("ok");
    const lost = await play.prefilled(p, 2);
    await p.kill();
    const again = await play.engine("p");
    expect(await play.handedOver(again, d, 3)).toBe("ok");
    // The dead process's KV is lost, although its successor has the same engine id and the same
    // block ids.
    expect(await play.decoded(d, lost, 2)).toBe("KV_GENERATION_STALE");
    expect(await play.handedOver(again, d, 4)).toBe("ok");
  });

  it("an engine that was not used for engine_ttl is dropped, and opened again for the next request", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair({}, { extra: { engine_ttl: 50 } });
    const params = await play.prefilled(p);
    expect(await play.decoded(d, params)).toBe("ok");
    await play.clock.advance(49_000);
    expect(play.logged("d", "peer-dropped")).toEqual([]);
    await play.clock.advance(2000);
    expect(play.logged("d", "peer-dropped")).toMatchObject([{ engineId: "p", references: 0 }]);
    expect(await play.handedOver(p, d, 2)).toBe("ok");
    expect(play.logged("d", "remote-engine-ready").length).toBe(2);
    const passed = expect.stringMatching(
      /^compatibility check passed \(hash [0-9a-f]{64}\)$/,
    ) as string;
    const handshake = { engineId: "p", ownEngineId: "d", compatibility: passed };
    expect(play.logged("d", "handshake-done")).toMatchObject([handshake, handshake]);
  });

  it("H1: an incompatible engine is refused at once, and P freed, with the factor that differs, unless enforce_handshake_compat is false", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair({ model: "another-model" });
    const lax = await play.engine("lax", { extra: { enforce_handshake_compat: false } });
    const params = await play.prefilled(p);
    expect(await play.decoded(d, params)).toBe("KV_HANDSHAKE_INCOMPATIBLE");
    expect(String(play.logged("d", "handshake_setup_failed")[0]?.error)).toMatch(
      /model.*sim.*another-model/,
    );
    await play.frees(p, 20);
    expect(play.logged("lax", "compatibility-relaxed")).toEqual([]);
    expect(await play.handedOver(p, lax, 2)).toBe("ok");
    // The differences are logged.
    expect(play.logged("d", "handshake-done")).toEqual([]);
    expect(play.logged("lax", "handshake-done")).toMatchObject([
      { engineId: "p", ownEngineId: "lax", compatibility: "compatibility check relaxed" },
    ]);
    expect(play.logged("lax", "compatibility-relaxed")).toMatchObject([
      { engineId: "p", differences: [{ factor: "model", ours: "sim", theirs: "another-model" }] },
    ]);
  });

  it.each([
    ["sizes that do not divide one another", { tpSize: 3 }, "KV_TOPOLOGY_INVALID"],
    ["other blocks in a layout that cannot be cut", { blockSize: 32 }, "KV_PLAN_UNSUPPORTED"],
    ["pipeline stages", { ppSize: 2, tpSize: 1 }, "KV_PLAN_UNSUPPORTED"],
    ["fewer ranks, in a layout that cannot be cut", { tpSize: 1 }, "KV_PLAN_UNSUPPORTED"],
  ])(
    "H1: an engine that does not fit is refused at once, and P freed: %s",
    async (_, change, code) => {
      await using play = createScenario();
      const common = { numKvHeads: 6, layout: "LHBNC" as const };
      const { p, d } = await play.pair(
        { tpSize: 2, ...common },
        { tpSize: 2, ...common, ...change },
      );
      for (const n of [1, 2, 3]) {
        const startedMs = play.clock.now();
        expect(await play.handedOver(p, d, n)).toBe(code);
        await play.frees(p);
        expect(play.clock.now() - startedMs).toBeLessThan(200);
      }
      // Another configuration may have taken its place.
      await play.clock.advance(10_000);
      expect(await play.handedOver(p, d, 4)).toBe(code);
      expect(
        play.logged("d", "handshake_failed").length +
          play.logged("d", "handshake_setup_failed").length,
      ).toBeGreaterThan(1);
    },
  );

  it("with per_worker_ports on both sides, each rank has its own side-channel port", async () => {
    await using play = createScenario();
    const extra = { per_worker_ports: true };
    const { p, d } = await play.pair({ tpSize: 2, extra }, { tpSize: 2, extra });
    const params = await play.prefilled(p);
    expect(play.network.outstanding().listeners).toBe(4);
    expect(await play.decoded(d, params)).toBe("ok");
  });
});

describe("leases", () => {
  it("expire without a reader, and a later reader is refused", async () => {
    for (const plain of [false, true]) {
      await using play = createScenario();
      const { p, d } = await play.pair({ plain });
      const params = await play.prefilled(p);
      await play.clock.advance(29_900);
      expect(p.outstanding().kept).toBe(1);
      await play.frees(p, 200);
      expect(play.counted("p", "expiredRequests")).toBe(1);
      expect(await play.decoded(d, params)).toBe("KV_LEASE_EXPIRED");
      expect(play.counted("d", "expiredRequests")).toBe(1);
    }
  });

  it("last for VLLM_NIXL_ABORT_REQUEST_TIMEOUT when a request gets no heartbeat", async () => {
    await using play = createScenario();
    const p = await play.engine("p", { env: { VLLM_NIXL_ABORT_REQUEST_TIMEOUT: "120" } });
    await play.prefilled(p);
    await play.clock.advance(119_000);
    expect(p.outstanding().kept).toBe(1);
    await play.frees(p, 2000);
  });

  it("end with the producer's process: a lease reply of its successor does not count", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair();
    expect(await play.handedOver(p, d)).toBe("ok");
    const params = await play.prefilled(p, 2);
    // The lease query after the READ is delayed.
    play.network.setFaults([
      { fault: "delay", operation: "REQUEST", from: "d", delayMs: 500, times: 1 },
    ]);
    const work = started(d.decode({ ...prompt(2), params }));
    await play.clock.advance(100);
    await p.kill();
    const again = await play.engine("p");
    // The successor holds blocks with the same request id and generation.
    await play.prefilled(again);
    const same = await play.prefilled(again, 2);
    expect(same.kv_peer).toMatchObject({
      generation: (params.kv_peer as { generation: number }).generation,
    });
    expect(await play.outcome(work)).toBe("KV_LEASE_EXPIRED");
  });

  it("two readers of the same parameters: one gets the KV, and neither gets another request's KV", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair({ numBlocks: 3 });
    const e = await play.engine("e");
    const params = await play.prefilled(p);
    expect(await play.decoded(d, params)).toBe("ok");
    await play.clock.advance(100);
    const other = await play.prefilled(p, 2);
    // By the clock, the first request's lease has not ended, but its blocks now belong to the
    // second request.
    expect(await play.decoded(e, params)).toBe("KV_LEASE_EXPIRED");
    expect(await play.decoded(e, other, 2)).toBe("ok");
  });
});

describe("notifications", () => {
  it("to a vLLM producer are attached to the READ, one from each reader, with the number of readers", async () => {
    const said: string[] = [];
    await using play = createScenario({
      faults: [
        {
          fault: "delay",
          operation: "NOTIFY",
          delayMs: 0,
          where: ({ payload, from }) => {
            if (payload !== undefined) said.push(`${from} ${text(payload)}`);
            return false;
          },
        },
      ],
    });
    const { p, d } = await play.pair({ plain: true }, { tpSize: 2 });
    expect(await play.handedOver(p, d, 1, { requestId: "other-name" })).toBe("ok");
    expect(said).toEqual(["d r1:2", "d r1:2"]);
    await play.frees(p, 10);
  });

  it("reach every rank of a producer with more ranks, including ranks that are not read", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair({ tpSize: 4, numKvHeads: 2 }, { tpSize: 1, numKvHeads: 2 });
    expect(await play.handedOver(p, d)).toBe("ok");
    await play.frees(p);
  });

  it("are sent after a failed READ, so that the producer frees its blocks before the lease ends", async () => {
    await using play = createScenario({ faults: [{ fault: "fail", operation: "READ", times: 1 }] });
    const { p, d } = await play.pair({ tpSize: 2 });
    expect(await play.handedOver(p, d)).toBe("KV_TRANSFER_FAILED");
    await play.frees(p);
    expect(play.counted("d", "failedTransfers")).toBe(1);
  });

  it("that are malformed or name an unknown request have no effect", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair();
    const kept = await play.prefilled(p);
    const agent = await play.stranger("d", kept);
    for (const payload of [
      "",
      ":",
      "r1",
      "r1:",
      "r1:0",
      "r1:-1",
      "r1:x",
      "HB:",
      "HB:,,",
      "PUSH_REG:",
      "KV1:",
      "nobody:1",
    ]) {
      await play.clock.settle(agent.notify(new TextEncoder().encode(payload)));
    }
    await play.clock.settle(agent.notify(new Uint8Array([0xff, 0xfe, 0x3a, 0x31])));
    await play.clock.advance(50);
    expect(p.outstanding().kept).toBe(1);
    expect(play.counted("p", "notificationsAfterExpiry")).toBe(1);
    expect(await play.decoded(d, kept)).toBe("ok");
    await agent.close();
  });
});

describe("failed and aborted transfers", () => {
  it("the engine computes KV that did not arrive when kv_load_failure_policy is recompute", async () => {
    await using play = createScenario({ faults: [{ fault: "fail", operation: "READ", times: 1 }] });
    const { p, d } = await play.pair({}, { tpSize: 2, loadFailurePolicy: "recompute" });
    expect(await play.handedOver(p, d)).toBe("ok");
    expect(play.logged("d", "receive-failed").length).toBeGreaterThan(0);
  });

  it("an abort during the handshake frees D's blocks at once, and P's when P can be notified", async () => {
    await using play = createScenario({
      faults: [{ fault: "delay", operation: "REQUEST", delayMs: 2000, times: 1 }],
    });
    const { p, d } = await play.pair();
    const params = await play.prefilled(p);
    void started(d.decode({ ...prompt(1), params }));
    await play.clock.advance(500);
    d.abort("r1");
    await play.clock.advance(50);
    expect([d.outstanding().kept, d.outstanding().blocks, p.outstanding().kept]).toEqual([0, 0, 1]);
    await play.frees(p, 1600);
  });
});

it("a worker closes after CLOSE_GRACE_MS although a READ is never released, and its agent ends the READ", async () => {
  const play = createScenario();
  const { p, d } = await play.pair({}, { wrapTransport: neverReleasing });
  const params = await play.prefilled(p);
  d.decode({ ...prompt(1), params }).catch(() => {});
  await play.clock.advance(100);
  const startedMs = play.clock.now();
  await play.clock.settle(d.close());
  // The worker waits once for running receives, and once for the peers that they reference.
  expect(play.clock.now() - startedMs).toBeLessThan(2 * CLOSE_GRACE_MS + 200);
  expect(play.logged("d", "close-did-not-wait")).toEqual([
    { receives: 1, notifications: 0 },
    { closing: 1 },
  ]);
});
