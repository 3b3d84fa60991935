import type { ConnectorModule, WorkerConnector } from "@kv/interface";
import { neverReleasing } from "@kv/testing/faults/sabotage";
import { createScenario as createAnyScenario, prompt } from "@kv/testing/scenarios/scenario";
import { coordinatesOf } from "@kv/testing/simulator/sim-engine";
import type { FaultRule } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { CLOSE_GRACE_MS } from "../../connector/src/peers/background-work.js";
import { pushConnector } from "../src/index.js";

const createScenario = (faults: readonly FaultRule[] = []) =>
  createAnyScenario({ faults, connector: pushConnector });
const legs = (n: number, numTokens = 40) => ({
  prefill: { ...prompt(n, numTokens), requestId: `cmpl-r${n}-0-0000aaaa` },
  decode: { ...prompt(n, numTokens), requestId: `cmpl-r${n}-0-bbbb0000` },
});

/** P and D after request 1, so that each has an open link to the other's process. */
async function acquainted(play: ReturnType<typeof createScenario>) {
  const p = await play.engine("p");
  const d = await play.engine("d");
  const { prefill, decode } = legs(1);
  const params = await play.clock.settle(p.prefill(prefill));
  expect(await play.outcome(d.decode({ ...decode, params }))).toBe("ok");
  return { p, d };
}

const text = (payload: Uint8Array | undefined) => new TextDecoder().decode(payload);

describe("the producer frees its blocks at once", () => {
  it("after a full prefix hit, in either order", async () => {
    const play = createScenario();
    const p = await play.engine("p");
    const d = await play.engine("d");
    const { prefill, decode } = legs(1);
    const params = await play.clock.settle(p.prefill(prefill));
    expect(await play.outcome(d.decode({ ...decode, params, cachedTokens: 40 }))).toBe("ok");
    await play.clock.advance(50);
    expect(p.outstanding().kept).toBe(0);

    const second = legs(2);
    const early = coordinatesOf(p, "r2");
    expect(
      await play.outcome(d.decode({ ...second.decode, params: early, cachedTokens: 40 })),
    ).toBe("ok");
    await play.clock.settle(p.prefill(second.prefill));
    await play.clock.advance(50);
    expect(p.outstanding().kept).toBe(0);
    await play.end();
  });

  it("after a decode request was aborted before, during and after its registration", async () => {
    for (const afterMs of [0, 1, 5, 20]) {
      const play = createScenario();
      const p = await play.engine("p");
      const d = await play.engine("d");
      const { prefill, decode } = legs(1);
      const work = d.decode({ ...decode, params: coordinatesOf(p, "r1") });
      work.catch(() => {});
      await play.clock.advance(afterMs);
      d.abort(decode.requestId);
      expect(await play.outcome(work)).toBe("KV_REQUEST_ABORTED");
      await play.clock.advance(50);
      expect(d.outstanding().blocks).toBe(0);
      await play.clock.settle(p.prefill(prefill));
      await play.clock.advance(50);
      expect([p.outstanding().kept, p.outstanding().blocks]).toEqual([0, 0]);
      await play.end();
    }
  });
});

describe("the consumer gets an ended notice at once", () => {
  it("when a WRITE fails, and both sides free their blocks", async () => {
    const play = createScenario([{ fault: "fail", operation: "WRITE", times: 1 }]);
    const p = await play.engine("p", { tpSize: 2 });
    const d = await play.engine("d");
    const { prefill, decode } = legs(1);
    const startedMs = play.clock.now();
    const params = await play.clock.settle(p.prefill(prefill));
    expect(await play.outcome(d.decode({ ...decode, params }))).toBe("KV_TRANSFER_FAILED");
    expect(play.clock.now() - startedMs).toBeLessThan(200);
    await play.clock.advance(50);
    expect([p.outstanding().kept, d.outstanding().blocks]).toEqual([0, 0]);
    await play.end();
  });

  it("when the prefill is aborted, in either order", async () => {
    for (const abortFirst of [false, true]) {
      const play = createScenario();
      const p = await play.engine("p");
      const d = await play.engine("d");
      const { prefill, decode } = legs(1);
      const computing = p.prefill(prefill);
      computing.catch(() => {});
      const params = coordinatesOf(p, "r1");
      if (abortFirst) {
        p.abort(prefill.requestId);
        await play.clock.advance(20);
      }
      const work = d.decode({ ...decode, params });
      work.catch(() => {});
      if (!abortFirst) {
        // The prompt takes two steps at most, so the registration is still on its way.
        p.abort(prefill.requestId);
      }
      const startedMs = play.clock.now();
      expect(await play.outcome(work)).toMatch(/KV_REQUEST_ABORTED|KV_GENERATION_STALE/);
      expect(play.clock.now() - startedMs).toBeLessThan(500);
      await play.end();
    }
  });

  it("when the producer was restarted in between", async () => {
    const play = createScenario();
    const { p, d } = await acquainted(play);
    const work = d.decode({ ...legs(2).decode, params: coordinatesOf(p, "r2") });
    work.catch(() => {});
    await play.clock.advance(100);
    await p.kill();
    await play.engine("p");
    const startedMs = play.clock.now();
    expect(await play.outcome(work)).toBe("KV_PEER_DISCONNECTED");
    // A heartbeat detects it, before the deadline.
    expect(play.clock.now() - startedMs).toBeLessThan(12_000);
    await play.clock.advance(2000);
    expect(d.outstanding().blocks).toBe(0);
    await play.end();
  });

  it("when it has restarted under the same name, although the producer's link leads to the old process", async () => {
    const play = createScenario();
    const { p, d: before } = await acquainted(play);
    await before.kill();
    const d = await play.engine("d");
    // The ended notice is the only message to the new process: no WRITE opens the link again.
    const { prefill, decode } = legs(2);
    const gone = p.prefill(prefill);
    p.abort(prefill.requestId);
    expect(await play.outcome(gone)).toBe("KV_REQUEST_ABORTED");
    const startedMs = play.clock.now();
    const work = d.decode({ ...decode, params: coordinatesOf(p, "r2") });
    expect(await play.outcome(work)).toMatch(/KV_REQUEST_ABORTED|KV_GENERATION_STALE/);
    expect(play.clock.now() - startedMs).toBeLessThan(500);
    await play.end();
  });

  it("when it has restarted under the same name and withdraws a registration", async () => {
    const play = createScenario();
    const { p, d: before } = await acquainted(play);
    await before.kill();
    const d = await play.engine("d");
    const { decode } = legs(2);
    const work = d.decode({ ...decode, params: coordinatesOf(p, "r2") });
    work.catch(() => {});
    await play.clock.advance(50);
    d.abort(decode.requestId);
    expect(await play.outcome(work)).toBe("KV_REQUEST_ABORTED");
    await play.clock.advance(200);
    expect([d.outstanding().kept, d.outstanding().blocks]).toEqual([0, 0]);
    await play.end();
  });

  it("when the prompt went to another decode request", async () => {
    const play = createScenario();
    const p = await play.engine("p");
    const d = await play.engine("d");
    const e = await play.engine("e");
    const { prefill, decode } = legs(1);
    const params = await play.clock.settle(p.prefill(prefill));
    const settled = await play.clock.settle(
      Promise.allSettled([d.decode({ ...decode, params }), e.decode({ ...decode, params })]),
    );
    const outcomes = settled.map((one) =>
      one.status === "fulfilled" ? "ok" : (one.reason as { code: string }).code,
    );
    expect(outcomes.sort()).toEqual(["KV_GENERATION_STALE", "ok"]);
    await play.end();
  });
});

describe("no WRITE lands in the blocks of another request", () => {
  it("the blocks of an aborted request are not reused until the producer has released them", async () => {
    const play = createScenario([{ fault: "delay", operation: "WRITE", delayMs: 3000, times: 1 }]);
    const p = await play.engine("p");
    const d = await play.engine("d", { numBlocks: 3 });
    const first = legs(1);
    const second = legs(2);
    const params = await play.clock.settle(p.prefill(first.prefill));
    const work = d.decode({ ...first.decode, params });
    work.catch(() => {});
    await play.clock.advance(100);
    d.abort(first.decode.requestId);
    const next = await play.clock.settle(p.prefill(second.prefill));
    expect(await play.outcome(d.decode({ ...second.decode, params: next }))).toBe("ok");
    await play.end();
  });

  it("a registration that arrives after its withdrawal is dropped", async () => {
    // The withdrawal overtakes the registration.
    const play = createScenario([
      {
        fault: "reorder",
        operation: "NOTIFY",
        from: "d",
        delayMs: 400,
        times: 1,
        where: ({ payload }) => text(payload).startsWith("PUSH_REG:"),
      },
    ]);
    const p = await play.engine("p");
    const d = await play.engine("d", { numBlocks: 3 });
    const { prefill, decode } = legs(1);
    const work = d.decode({ ...decode, params: coordinatesOf(p, "r1") });
    work.catch(() => {});
    await play.clock.advance(50);
    d.abort(decode.requestId);
    await play.clock.advance(100);
    expect(d.outstanding().blocks).toBe(0);
    // Another request has the blocks when the first prompt is computed and its registration
    // arrives.
    const other = legs(2);
    const params = await play.clock.settle(p.prefill(other.prefill));
    expect(await play.outcome(d.decode({ ...other.decode, params }))).toBe("ok");
    await play.clock.advance(600);
    await play.clock.settle(p.prefill(prefill));
    await play.clock.advance(100);
    expect(p.outstanding().kept).toBe(0);
    await play.end();
  });

  it("with a silent producer the request ends at its deadline, and its blocks are kept until the producer answers", async () => {
    const play = createScenario();
    const p = await play.engine("p");
    const d = await play.engine("d", { extra: { request_timeout: 5, kv_lease_duration: 600 } });
    const { decode } = legs(1);
    const work = d.decode({ ...decode, params: coordinatesOf(p, "r1") });
    work.catch(() => {});
    await play.clock.advance(100);
    play.network.disconnect("p", "d");
    const startedMs = play.clock.now();
    expect(await play.outcome(work)).toBe("KV_REQUEST_TIMEOUT");
    expect(play.clock.now() - startedMs).toBeLessThan(6000);
    expect(d.outstanding().blocks).toBe(3);
    play.network.reconnect("p", "d");
    await play.clock.advance(3000);
    expect(d.outstanding().blocks).toBe(0);
    await play.end();
  });
});

describe("with a vLLM producer", () => {
  it("the blocks of an aborted request are kept until the done notification arrives, or for decoder_kv_blocks_ttl", async () => {
    const play = createScenario();
    const p = await play.engine("p", { plain: true });
    const d = await play.engine("d", { extra: { decoder_kv_blocks_ttl: 40 } });
    for (const isWritten of [true, false]) {
      const n = isWritten ? 1 : 2;
      const { prefill, decode } = legs(n);
      const work = d.decode({ ...decode, params: coordinatesOf(p, `r${n}`) });
      work.catch(() => {});
      await play.clock.advance(50);
      d.abort(decode.requestId);
      await play.clock.advance(10_000);
      expect(d.outstanding().blocks).toBe(3);
      if (isWritten) await play.clock.settle(p.prefill(prefill));
      await play.clock.advance(isWritten ? 100 : 31_000);
      expect(d.outstanding().blocks).toBe(0);
    }
    // P keeps the registration of a request that it never gets for vLLM's 480 s.
    await play.clock.advance(480_000);
    await play.end();
  });

  it("a pair with unequal block sizes is refused before a block is registered", async () => {
    const sent: string[] = [];
    const play = createScenario([
      {
        fault: "delay",
        operation: "NOTIFY",
        delayMs: 0,
        where: ({ payload }) => sent.push(text(payload)) < 0,
      },
    ]);
    const p = await play.engine("p", { plain: true });
    const d = await play.engine("d", { blockSize: 32 });
    const { prefill, decode } = legs(1);
    const params = await play.clock.settle(p.prefill(prefill));
    expect(await play.outcome(d.decode({ ...decode, params }))).toBe("KV_PLAN_UNSUPPORTED");
    expect(sent.filter((message) => message.startsWith("PUSH_REG"))).toEqual([]);
    await play.end();
  });

  it("both ranks of a consumer send the same registration, and it is served once", async () => {
    const sent: string[] = [];
    const play = createScenario([
      {
        fault: "delay",
        operation: "NOTIFY",
        delayMs: 0,
        where: ({ payload, from }) => {
          const message = text(payload);
          sent.push(`${from} ${message.startsWith("PUSH_REG:") ? "PUSH_REG" : message}`);
          return false;
        },
      },
    ]);
    const p = await play.engine("p", { plain: true });
    const d = await play.engine("d", { tpSize: 2, plain: true });
    const { prefill, decode } = legs(1);
    const params = await play.clock.settle(p.prefill(prefill));
    expect(await play.outcome(d.decode({ ...decode, params }))).toBe("ok");
    await play.clock.advance(100);
    expect(p.outstanding().kept).toBe(0);
    expect(sent.filter((message) => message.endsWith("bbbb0000:1")).length).toBe(2);
    await play.end();
  });
});

describe("leases", () => {
  it("expire without a registration, and a later registration gets an ended notice", async () => {
    const play = createScenario();
    const p = await play.engine("p");
    const d = await play.engine("d");
    const { prefill, decode } = legs(1);
    const params = await play.clock.settle(p.prefill(prefill));
    await play.clock.advance(30_100);
    expect(p.outstanding().kept).toBe(0);
    expect(play.counted("p", "expiredRequests")).toBe(1);
    const startedMs = play.clock.now();
    expect(await play.outcome(d.decode({ ...decode, params }))).toBe("KV_GENERATION_STALE");
    expect(play.clock.now() - startedMs).toBeLessThan(200);
    await play.end();
  });

  it("are extended by heartbeats under any name that a peer uses for the request", async () => {
    for (const name of ["cmpl-r1-0-0000aaaa", "cmpl-r1-0", "r1"]) {
      const play = createScenario();
      const p = await play.engine("p");
      const params = await play.clock.settle(p.prefill(legs(1).prefill));
      const agent = await play.stranger("x", params);
      for (let i = 0; i < 4; i++) {
        await play.clock.advance(15_000);
        await play.clock.settle(agent.notify(new TextEncoder().encode(`HB:someone-else,${name}`)));
        await play.clock.advance(50);
        expect(p.outstanding().kept).toBe(1);
      }
      await play.clock.advance(20_100);
      expect(p.outstanding().kept).toBe(0);
      await agent.close();
      await play.end();
    }
  });

  it("keep a request whose consumer waits for free blocks", async () => {
    const play = createScenario([{ fault: "drop", operation: "WRITE", times: 1 }]);
    const p = await play.engine("p");
    const d = await play.engine("d", { numBlocks: 3, extra: { request_timeout: 100 } });
    const [first, second] = [legs(1), legs(2)];
    const params = await play.clock.settle(
      Promise.all([p.prefill(first.prefill), p.prefill(second.prefill)]),
    );
    const one = d.decode({ ...first.decode, params: params[0] });
    one.catch(() => {});
    await play.clock.advance(10);
    const two = d.decode({ ...second.decode, params: params[1] });
    await play.clock.advance(50_000);
    expect(p.outstanding().kept).toBe(2);
    expect(await play.outcome(one)).toMatch(/KV_TRANSFER_TIMEOUT|KV_REQUEST_TIMEOUT/);
    expect(await play.outcome(two)).toBe("ok");
    await play.end();
  });
});

describe("a decode worker that closes", () => {
  it.each([
    { what: "was killed", plain: false, hangs: false },
    { what: "was killed and is a vLLM producer", plain: true, hangs: false },
    { what: "was killed while its side channel hangs", plain: false, hangs: true },
  ])(
    "waits for CLOSE_GRACE_MS and no longer for a producer that $what",
    async ({ plain, hangs }) => {
      const workers: WorkerConnector[] = [];
      const connector: ConnectorModule = {
        ...pushConnector,
        async createWorker(options) {
          const worker = await pushConnector.createWorker(options);
          workers.push(worker);
          return worker;
        },
      };
      const play = createAnyScenario({ connector });
      const p = await play.engine("p", { plain });
      const d = await play.engine("d");
      // Two requests: the end of one must not hold up the other.
      for (const n of [1, 2]) {
        d.decode({ ...legs(n).decode, params: coordinatesOf(p, `r${n}`) }).catch(() => {});
      }
      await play.clock.advance(100);
      const [writer, receiver] = workers.map((worker) => worker.outstanding());
      expect([writer?.registrations, receiver?.receives]).toEqual([2, 2]);
      await p.kill();
      // The repeats of its withdrawal do not coincide with the end of the grace period.
      d.abort(legs(1).decode.requestId);
      await play.clock.advance(400);
      if (hangs)
        play.network.setFaults([{ fault: "drop", operation: "REQUEST", from: "d", to: "p" }]);
      const startedMs = play.clock.now();
      await play.clock.settle(d.close());
      const tookMs = play.clock.now() - startedMs;
      // It waits the full grace period for the producer, and reuses none of the registered blocks.
      expect(tookMs).toBeGreaterThanOrEqual(CLOSE_GRACE_MS);
      expect(tookMs).toBeLessThan(CLOSE_GRACE_MS + 200);
      expect(play.logged("d", "close-did-not-wait")).toEqual([{ receives: 2, notifications: 0 }]);
      for (const worker of workers) expect(worker.collectFinished().finishedReceiving).toEqual([]);
      expect(Object.entries(play.network.outstanding()).filter(([, count]) => count !== 0)).toEqual(
        [],
      );
      expect(play.clock.pendingTimers).toBe(0);
      await play.end();
    },
  );
});

describe("a worker whose transport does not release a WRITE", () => {
  it("leaves it to the agent when the worker closes", async () => {
    const play = createScenario();
    const p = await play.engine("p", { wrapTransport: neverReleasing });
    const d = await play.engine("d");
    const { prefill, decode } = legs(1);
    const params = await play.clock.settle(p.prefill(prefill));
    expect(await play.outcome(d.decode({ ...decode, params }))).toBe("ok");
    const startedMs = play.clock.now();
    await play.clock.settle(p.close());
    // The worker waits once for the WRITE in flight, and once for the link that it uses.
    expect(play.clock.now() - startedMs).toBeLessThan(2 * CLOSE_GRACE_MS + 200);
    expect(play.logged("p", "close-did-not-wait")).toEqual([{ writes: 1 }, { closing: 1 }]);
    await play.clock.settle(d.close());
    // Beyond the WRITE's own deadline.
    await play.clock.advance(100_000);
    expect(Object.entries(play.network.outstanding()).filter(([, count]) => count !== 0)).toEqual(
      [],
    );
    expect(play.clock.pendingTimers).toBe(0);
  });
});

describe("the queue of each consumer", () => {
  it("a consumer that does not answer delays no other", async () => {
    const play = createScenario();
    const p = await play.engine("p", { numBlocks: 256 });
    const dead = await play.engine("dead", { numBlocks: 256 });
    const d = await play.engine("d");
    const params = await play.clock.settle(
      Promise.all(Array.from({ length: 21 }, (_, n) => p.prefill(legs(n).prefill))),
    );
    play.network.setFaults([{ fault: "drop", operation: "WRITE", to: "dead" }]);
    const stuck = params.slice(0, 20).map((each, n) => {
      const work = dead.decode({ ...legs(n).decode, params: each });
      work.catch(() => {});
      return work;
    });
    await play.clock.advance(100);
    const startedMs = play.clock.now();
    expect(await play.outcome(d.decode({ ...legs(20).decode, params: params[20] ?? {} }))).toBe(
      "ok",
    );
    expect(play.clock.now() - startedMs).toBeLessThan(200);
    for (const work of stuck) expect(await play.outcome(work)).toMatch(/TIMEOUT/);
    await play.end();
  });

  it("a consumer whose side channel hangs delays no other", async () => {
    const play = createScenario([{ fault: "drop", operation: "REQUEST", from: "p", to: "slow" }]);
    const p = await play.engine("p");
    const slow = await play.engine("slow", { extra: { request_timeout: 8 } });
    const d = await play.engine("d");
    const [a, b] = [legs(1), legs(2)];
    const params = await play.clock.settle(
      Promise.all([p.prefill(a.prefill), p.prefill(b.prefill)]),
    );
    const work = slow.decode({ ...a.decode, params: params[0] });
    work.catch(() => {});
    await play.clock.advance(20);
    const startedMs = play.clock.now();
    expect(await play.outcome(d.decode({ ...b.decode, params: params[1] }))).toBe("ok");
    expect(play.clock.now() - startedMs).toBeLessThan(200);
    expect(await play.outcome(work)).toBe("KV_REQUEST_TIMEOUT");
    play.network.setFaults([]);
    await play.clock.advance(600_000);
    await play.end();
  });
});

describe("KV that did not arrive", () => {
  it("is computed by the engine if the policy is recompute", async () => {
    const play = createScenario([{ fault: "fail", operation: "WRITE", times: 1 }]);
    const p = await play.engine("p");
    const d = await play.engine("d", { tpSize: 2, loadFailurePolicy: "recompute" });
    const { prefill, decode } = legs(1);
    const params = await play.clock.settle(p.prefill(prefill));
    expect(await play.outcome(d.decode({ ...decode, params }))).toBe("ok");
    expect(play.logged("d", "receive-failed").length).toBeGreaterThan(0);
    await play.end();
  });

  it("is not replaced by the KV of another prompt under the same client id", async () => {
    const play = createScenario();
    const p = await play.engine("p");
    const d = await play.engine("d", { extra: { request_timeout: 3 } });
    const lengths = [41, 40, 4];
    await play.clock.settle(Promise.all(lengths.map((_, n) => p.prefill(legs(n, 40).prefill))));
    const startedMs = play.clock.now();
    for (const [n, numTokens] of lengths.entries()) {
      const other = { prompt: 9, numTokens, requestId: legs(n).decode.requestId };
      const answer = d.decode({ ...other, params: coordinatesOf(p, `r${n}`) });
      expect(await play.outcome(answer)).toBe("KV_PROMPT_MISMATCH");
    }
    expect(play.clock.now() - startedMs).toBeLessThan(1000);
    await play.end();
  });
});
