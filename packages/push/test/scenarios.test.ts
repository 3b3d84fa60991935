import type { ConnectorModule, WorkerConnector } from "@kv/interface";
import { neverReleasing } from "@kv/testing/faults/sabotage";
import {
  createScenario as createAnyScenario,
  prompt,
  started,
} from "@kv/testing/scenarios/scenario";
import { coordinatesOf, type SimEngine } from "@kv/testing/simulator/sim-engine";
import type { FaultRule } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { CLOSE_GRACE_MS } from "../../connector/src/peers/transfers.js";
import { pushConnector } from "../src/index.js";

const createScenario = (faults: readonly FaultRule[] = []) =>
  createAnyScenario({ faults, connector: pushConnector });
const legs = (n: number, numTokens = 40) => ({
  prefill: { ...prompt(n, numTokens), requestId: `cmpl-r${n}-0-0000aaaa` },
  decode: { ...prompt(n, numTokens), requestId: `cmpl-r${n}-0-bbbb0000` },
});

type Play = ReturnType<typeof createScenario>;

/** D's leg after P's. */
async function handed(play: Play, p: SimEngine, d: SimEngine, n = 1): Promise<string> {
  const { prefill, decode } = legs(n);
  return play.decoded(d, await play.prefilled(p, 1, prefill), 1, decode);
}

/** D's leg, which the proxy sends without P's answer. */
const early = (p: SimEngine, d: SimEngine, n: number) =>
  d.decode({ ...legs(n).decode, params: coordinatesOf(p, `r${n}`) });

/** P and D after request 1, so that each has an open link to the other's process. */
async function acquainted(play: ReturnType<typeof createScenario>) {
  const { p, d } = await play.pair();
  expect(await handed(play, p, d)).toBe("ok");
  return { p, d };
}

const text = (payload: Uint8Array | undefined) => new TextDecoder().decode(payload);

describe("the producer frees its blocks at once", () => {
  it("after a full prefix hit, in either order", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair();
    const { prefill, decode } = legs(1);
    const params = await play.prefilled(p, 1, prefill);
    expect(await play.outcome(d.decode({ ...decode, params, cachedTokens: 40 }))).toBe("ok");
    await play.frees(p);

    const second = legs(2);
    const coordinates = coordinatesOf(p, "r2");
    const hit = { ...second.decode, cachedTokens: 40 };
    expect(await play.decoded(d, coordinates, 1, hit)).toBe("ok");
    await play.prefilled(p, 1, second.prefill);
    await play.frees(p);
  });

  it.each([
    ["sizes that do not divide one another", { tpSize: 3 }, "KV_TOPOLOGY_INVALID"],
    ["other blocks in a layout that cannot be cut", { blockSize: 32 }, "KV_PLAN_UNSUPPORTED"],
    ["pipeline stages", { ppSize: 2, tpSize: 1 }, "KV_PLAN_UNSUPPORTED"],
  ])("H1: after the consumer refused it, in either order: %s", async (_, change, code) => {
    await using play = createScenario();
    const common = { numKvHeads: 6, layout: "LHBNC" as const };
    const { p, d } = await play.pair({ tpSize: 2, ...common }, { tpSize: 2, ...common, ...change });
    const { prefill, decode } = legs(1);
    expect(await play.decoded(d, coordinatesOf(p, "r1"), 1, decode)).toBe(code);
    const params = await play.prefilled(p, 1, prefill);
    await play.frees(p);
    const second = legs(2);
    Object.assign(params, await play.prefilled(p, 2, second.prefill));
    expect(await play.decoded(d, params, 2, second.decode)).toBe(code);
    await play.frees(p);
  });

  it("after a decode request was aborted before, during and after its registration", async () => {
    for (const afterMs of [0, 1, 5, 20]) {
      await using play = createScenario();
      const { p, d } = await play.pair();
      const { prefill, decode } = legs(1);
      const work = started(early(p, d, 1));
      await play.clock.advance(afterMs);
      d.abort(decode.requestId);
      expect(await play.outcome(work)).toBe("KV_REQUEST_ABORTED");
      await play.clock.advance(50);
      expect(d.outstanding().blocks).toBe(0);
      await play.prefilled(p, 1, prefill);
      await play.clock.advance(50);
      expect([p.outstanding().kept, p.outstanding().blocks]).toEqual([0, 0]);
    }
  });
});

describe("the consumer gets an ended notice at once", () => {
  it("when a WRITE fails, and both sides free their blocks", async () => {
    await using play = createScenario([{ fault: "fail", operation: "WRITE", times: 1 }]);
    const { p, d } = await play.pair({ tpSize: 2 });
    expect(await play.within(200, handed(play, p, d))).toBe("KV_TRANSFER_FAILED");
    expect(play.logged("p", "transfer_failed")).toHaveLength(1);
    expect(play.counted("p", "failedTransfers")).toBe(1);
    await play.clock.advance(50);
    expect([p.outstanding().kept, d.outstanding().blocks]).toEqual([0, 0]);
  });

  it.each([
    [
      "announces other blocks to it",
      { extra: { push_announced_block_size: 32 } },
      {},
      "KV_PLAN_UNSUPPORTED",
    ],
    [
      "serves another model, which D does not compare",
      { model: "another" },
      { extra: { enforce_handshake_compat: false } },
      "KV_HANDSHAKE_INCOMPATIBLE",
    ],
  ] as const)(
    "H1: when the producer refuses a consumer that accepts it: P %s",
    async (_, change, own, code) => {
      await using play = createScenario();
      const { p, d } = await play.pair({ tpSize: 2, ...change }, own);
      for (const n of [1, 2]) {
        const { prefill, decode } = legs(n);
        const registered = n === 1 ? started(early(p, d, n)) : undefined;
        const params = await play.prefilled(p, n, prefill);
        expect(
          await play.within(100, play.outcome(registered ?? d.decode({ ...decode, params }))),
        ).toBe(code);
        await play.clock.advance(50);
        expect([p.outstanding().kept, d.outstanding().blocks]).toEqual([0, 0]);
      }
      expect(play.logged("p", "handshake_setup_failed").length).toBeGreaterThan(0);
    },
  );

  it("when the prefill is aborted, in either order", async () => {
    for (const abortFirst of [false, true]) {
      await using play = createScenario();
      const { p, d } = await play.pair();
      const { prefill, decode } = legs(1);
      void started(p.prefill(prefill));
      const params = coordinatesOf(p, "r1");
      if (abortFirst) {
        p.abort(prefill.requestId);
        await play.clock.advance(20);
      }
      const work = started(d.decode({ ...decode, params }));
      if (!abortFirst) {
        // The prompt takes two steps at most, so the registration is still on its way.
        p.abort(prefill.requestId);
      }
      expect(await play.within(500, play.outcome(work))).toMatch(
        /KV_REQUEST_ABORTED|KV_GENERATION_STALE/,
      );
    }
  });

  it("when it has restarted under the same name, although the producer's link leads to the old process", async () => {
    await using play = createScenario();
    const { p, d: before } = await acquainted(play);
    await before.kill();
    const d = await play.engine("d");
    // The ended notice is the only message to the new process: no WRITE opens the link again.
    const { prefill } = legs(2);
    const gone = p.prefill(prefill);
    p.abort(prefill.requestId);
    expect(await play.outcome(gone)).toBe("KV_REQUEST_ABORTED");
    const work = early(p, d, 2);
    expect(await play.within(500, play.outcome(work))).toMatch(
      /KV_REQUEST_ABORTED|KV_GENERATION_STALE/,
    );
  });

  it("when it has restarted under the same name and withdraws a registration", async () => {
    await using play = createScenario();
    const { p, d: before } = await acquainted(play);
    await before.kill();
    const d = await play.engine("d");
    const { decode } = legs(2);
    const work = started(early(p, d, 2));
    await play.clock.advance(50);
    d.abort(decode.requestId);
    expect(await play.outcome(work)).toBe("KV_REQUEST_ABORTED");
    await play.clock.advance(200);
    expect([d.outstanding().kept, d.outstanding().blocks]).toEqual([0, 0]);
  });

  it("when the prompt went to another decode request", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair();
    const e = await play.engine("e");
    const { prefill, decode } = legs(1);
    const params = await play.prefilled(p, 1, prefill);
    const settled = await play.clock.settle(
      Promise.allSettled([d.decode({ ...decode, params }), e.decode({ ...decode, params })]),
    );
    const outcomes = settled.map((one) =>
      one.status === "fulfilled" ? "ok" : (one.reason as { code: string }).code,
    );
    expect(outcomes.sort()).toEqual(["KV_GENERATION_STALE", "ok"]);
  });
});

describe("no WRITE lands in the blocks of another request", () => {
  it("a registration that arrives after its withdrawal is dropped", async () => {
    // The withdrawal overtakes the registration.
    await using play = createScenario([
      {
        fault: "reorder",
        operation: "NOTIFY",
        from: "d",
        delayMs: 400,
        times: 1,
        where: ({ payload }) => text(payload).startsWith("PUSH_REG:"),
      },
    ]);
    const { p, d } = await play.pair({}, { numBlocks: 3 });
    const { prefill, decode } = legs(1);
    void started(early(p, d, 1));
    await play.clock.advance(50);
    d.abort(decode.requestId);
    await play.clock.advance(100);
    expect(d.outstanding().blocks).toBe(0);
    // Another request has the blocks when the first prompt is computed and its registration
    // arrives.
    expect(await handed(play, p, d, 2)).toBe("ok");
    await play.clock.advance(600);
    await play.prefilled(p, 1, prefill);
    await play.frees(p, 100);
  });
});

describe("with a vLLM producer", () => {
  it("the blocks of an aborted request are kept until the done notification arrives, or for decoder_kv_blocks_ttl", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair({ plain: true }, { extra: { decoder_kv_blocks_ttl: 40 } });
    for (const isWritten of [true, false]) {
      const n = isWritten ? 1 : 2;
      const { prefill, decode } = legs(n);
      void started(early(p, d, n));
      await play.clock.advance(50);
      d.abort(decode.requestId);
      await play.clock.advance(10_000);
      expect(d.outstanding().blocks).toBe(3);
      if (isWritten) await play.prefilled(p, 1, prefill);
      await play.clock.advance(isWritten ? 100 : 31_000);
      expect(d.outstanding().blocks).toBe(0);
    }
    // P keeps the registration of a request that it never gets for vLLM's 480 s.
    await play.clock.advance(480_000);
  });

  it("a pair with unequal block sizes is refused before a block is registered", async () => {
    const sent: string[] = [];
    await using play = createScenario([
      {
        fault: "delay",
        operation: "NOTIFY",
        delayMs: 0,
        where: ({ payload }) => sent.push(text(payload)) < 0,
      },
    ]);
    const { p, d } = await play.pair({ plain: true }, { blockSize: 32 });
    expect(await handed(play, p, d)).toBe("KV_PLAN_UNSUPPORTED");
    expect(sent.filter((message) => message.startsWith("PUSH_REG"))).toEqual([]);
  });

  it("both ranks of a consumer send the same registration, and it is served once", async () => {
    const sent: string[] = [];
    await using play = createScenario([
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
    const { p, d } = await play.pair({ plain: true }, { tpSize: 2, plain: true });
    expect(await handed(play, p, d)).toBe("ok");
    await play.frees(p, 100);
    expect(sent.filter((message) => message.endsWith("bbbb0000:1")).length).toBe(2);
  });
});

describe("leases", () => {
  it("expire without a registration, and a later registration gets an ended notice", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair();
    const { prefill, decode } = legs(1);
    const params = await play.prefilled(p, 1, prefill);
    await play.clock.advance(30_100);
    expect(p.outstanding().kept).toBe(0);
    expect(play.counted("p", "expiredRequests")).toBe(1);
    expect(await play.within(200, play.decoded(d, params, 1, decode))).toBe("KV_GENERATION_STALE");
  });

  it("are extended by heartbeats under any name that a peer uses for the request", async () => {
    for (const name of ["cmpl-r1-0-0000aaaa", "cmpl-r1-0", "r1"]) {
      await using play = createScenario();
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
    }
  });

  it("keep a request whose consumer waits for free blocks", async () => {
    await using play = createScenario([{ fault: "drop", operation: "WRITE", times: 1 }]);
    const { p, d } = await play.pair({}, { numBlocks: 3, extra: { request_timeout: 100 } });
    const [first, second] = [legs(1), legs(2)];
    const params = await play.clock.settle(
      Promise.all([p.prefill(first.prefill), p.prefill(second.prefill)]),
    );
    const one = started(d.decode({ ...first.decode, params: params[0] }));
    await play.clock.advance(10);
    const two = d.decode({ ...second.decode, params: params[1] });
    await play.clock.advance(50_000);
    expect(p.outstanding().kept).toBe(2);
    expect(await play.outcome(one)).toMatch(/KV_TRANSFER_TIMEOUT|KV_REQUEST_TIMEOUT/);
    expect(await play.outcome(two)).toBe("ok");
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
      await using play = createAnyScenario({ connector });
      const { p, d } = await play.pair({ plain });
      // Two requests: the end of one must not hold up the other.
      for (const n of [1, 2]) {
        early(p, d, n).catch(() => {});
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
    },
  );
});

describe("a worker whose transport does not release a WRITE", () => {
  it("leaves it to the agent when the worker closes", async () => {
    const play = createScenario();
    const { p, d } = await play.pair({ wrapTransport: neverReleasing });
    expect(await handed(play, p, d)).toBe("ok");
    const startedMs = play.clock.now();
    await play.clock.settle(p.close());
    // The worker waits once for the WRITE in flight, and once for the link that it uses.
    expect(play.clock.now() - startedMs).toBeLessThan(2 * CLOSE_GRACE_MS + 200);
    expect(play.logged("p", "close-did-not-wait")).toEqual([{ writes: 1 }, { closing: 1 }]);
  });
});

describe("the queue of each consumer", () => {
  it("a consumer that does not answer delays no other", async () => {
    await using play = createScenario();
    const p = await play.engine("p", { numBlocks: 256 });
    const dead = await play.engine("dead", { numBlocks: 256 });
    const d = await play.engine("d");
    const params = await play.clock.settle(
      Promise.all(Array.from({ length: 21 }, (_, n) => p.prefill(legs(n).prefill))),
    );
    play.network.setFaults([{ fault: "drop", operation: "WRITE", to: "dead" }]);
    const stuck = params.slice(0, 20).map((each, n) => {
      const work = started(dead.decode({ ...legs(n).decode, params: each }));
      return work;
    });
    await play.clock.advance(100);
    expect(
      await play.within(
        200,
        play.outcome(d.decode({ ...legs(20).decode, params: params[20] ?? {} })),
      ),
    ).toBe("ok");
    for (const work of stuck) expect(await play.outcome(work)).toMatch(/TIMEOUT/);
  });

  it("a consumer whose side channel hangs delays no other", async () => {
    await using play = createScenario([
      { fault: "drop", operation: "REQUEST", from: "p", to: "slow" },
    ]);
    const p = await play.engine("p");
    const slow = await play.engine("slow", { extra: { request_timeout: 8 } });
    const d = await play.engine("d");
    const [a, b] = [legs(1), legs(2)];
    const params = await play.clock.settle(
      Promise.all([p.prefill(a.prefill), p.prefill(b.prefill)]),
    );
    const work = started(slow.decode({ ...a.decode, params: params[0] }));
    await play.clock.advance(20);
    expect(await play.within(200, play.decoded(d, params[1], 1, b.decode))).toBe("ok");
    expect(await play.outcome(work)).toBe("KV_REQUEST_TIMEOUT");
    play.network.setFaults([]);
    await play.clock.advance(600_000);
  });
});

describe("KV that did not arrive", () => {
  it("is computed by the engine if the policy is recompute", async () => {
    await using play = createScenario([{ fault: "fail", operation: "WRITE", times: 1 }]);
    const { p, d } = await play.pair({}, { tpSize: 2, loadFailurePolicy: "recompute" });
    expect(await handed(play, p, d)).toBe("ok");
    expect(play.logged("d", "receive-failed").length).toBeGreaterThan(0);
  });

  it("is not replaced by the KV of another prompt under the same client id", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair({}, { extra: { request_timeout: 3 } });
    const lengths = [41, 40, 4];
    await play.clock.settle(Promise.all(lengths.map((_, n) => p.prefill(legs(n, 40).prefill))));
    const startedMs = play.clock.now();
    for (const [n, numTokens] of lengths.entries()) {
      const other = { prompt: 9, numTokens, requestId: legs(n).decode.requestId };
      const answer = d.decode({ ...other, params: coordinatesOf(p, `r${n}`) });
      expect(await play.outcome(answer)).toBe("KV_PROMPT_MISMATCH");
    }
    expect(play.clock.now() - startedMs).toBeLessThan(1000);
  });
});
