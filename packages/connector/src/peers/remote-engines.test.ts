import { KvError } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { leavesNothing } from "@kv/testing/nothing-left";
import { listAgent, testContext, testRank } from "@kv/testing/worker-context";
import { describe, expect, it } from "vitest";
import type { EngineAddress } from "../requests/references.js";
import { type OpenEngine, planPrefillEngine } from "./remote-engine.js";
import { RemoteEngines } from "./remote-engines.js";

/** Remote engines of one rank each. The agent of the first one that opens is called `ENGINE#1`. */
function setUp({
  engineTtlMs = 0,
  answer = {} as Pick<OpenEngine, "registrationGeneration" | "fingerprint">,
} = {}) {
  const clock = manualClock();
  const log: string[] = [];
  let fail: KvError | undefined;
  const gates: (() => void)[] = [];
  let gated = false;
  let opened = 0;
  const agent = listAgent({
    addRemote: async (metadata) => new TextDecoder().decode(metadata),
    removeRemote: async (name) => void log.push(`close ${name}`),
  });
  const context = testContext({
    agent,
    clock,
    local: testRank(),
    answer,
    extra: { engine_ttl: engineTtlMs / 1000 },
    async remote(_, { engineId }) {
      log.push(`open ${engineId}`);
      if (gated) await new Promise<void>((resolve) => gates.push(resolve));
      if (fail !== undefined) throw fail;
      opened += 1;
      const agentMetadata = new TextEncoder().encode(`${engineId}#${opened}`);
      return [{ tpRank: 0, geometry: testRank(), agentMetadata }];
    },
  });
  const engines = new RemoteEngines(context, {
    failureType: "handshake_failed",
    role: "prefill",
    plan: (_, found) => planPrefillEngine(context, found, { preparesLists: false }),
  });
  // The tests hold references, which `close` waits for.
  leavesNothing(
    () => ({ timers: clock.pending() }),
    () => void engines.close(),
  );
  return {
    clock,
    log,
    engines,
    answer,
    failWith: (error: KvError | undefined) => {
      fail = error;
    },
    gate: () => {
      gated = true;
      return () => {
        gated = false;
        for (const open of gates.splice(0)) open();
      };
    },
  };
}

const nameOf = (engine: OpenEngine | undefined) => engine?.agents.get("pp0tp0");
const at = (engineId: string, port = 5600): EngineAddress => ({
  engineId,
  host: "p",
  port,
  tpSize: 1,
  dcpSize: 1,
  ppSize: 1,
});
const settle = async () => {
  for (let i = 0; i < 100; i++) await Promise.resolve();
};

describe("remote engines", () => {
  it("opens an engine once for concurrent callers", async () => {
    const { engines, log } = setUp();
    const [a, b] = await Promise.all([engines.open(at("e")), engines.open(at("e"))]);
    expect(a?.engine).toBe(b?.engine);
    expect(log).toEqual(["open e"]);
    expect(engines.peek(at("e"))).toBe(a?.engine);
    expect(engines.peek(at("other"))).toBeUndefined();
  });

  it("backs off from 1 s to 60 s, doubling after each failure; a success resets the delay", async () => {
    const { engines, clock, log, failWith } = setUp();
    failWith(new KvError("KV_HANDSHAKE_REFUSED", "no"));
    for (const delayMs of [1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000]) {
      await expect(engines.open(at("e"))).rejects.toMatchObject({ code: "KV_HANDSHAKE_REFUSED" });
      await expect(engines.open(at("e"))).rejects.toMatchObject({
        code: "KV_HANDSHAKE_BACKED_OFF",
      });
      clock.advance(delayMs - 1);
      await expect(engines.open(at("e"))).rejects.toMatchObject({
        code: "KV_HANDSHAKE_BACKED_OFF",
      });
      clock.advance(1);
    }
    expect(log.filter((line) => line.startsWith("open")).length).toBe(8);
    failWith(undefined);
    const hold = await engines.open(at("e"));
    hold.release();
    engines.drop(hold.engine, "test");
    await settle();
    failWith(new KvError("KV_HANDSHAKE_REFUSED", "no"));
    await expect(engines.open(at("e"))).rejects.toMatchObject({ code: "KV_HANDSHAKE_REFUSED" });
    clock.advance(1000);
    await expect(engines.open(at("e"))).rejects.toMatchObject({ code: "KV_HANDSHAKE_REFUSED" });
  });

  it("vllm#49238: a request that names another process than the one that was not reached is tried at once", async () => {
    const { engines, failWith } = setUp();
    failWith(new KvError("KV_HANDSHAKE_REFUSED", "no"));
    const outcome = async (incarnation?: string) => {
      const lease = incarnation === undefined ? {} : { lease: { incarnation } };
      return await engines.open({ ...at("e"), ...lease }).then(
        () => "ok",
        ({ code }: KvError) => code,
      );
    };
    expect(await outcome("dead")).toBe("KV_HANDSHAKE_REFUSED");
    expect(await outcome("dead")).toBe("KV_HANDSHAKE_BACKED_OFF");
    expect(await outcome()).toBe("KV_HANDSHAKE_BACKED_OFF");
    expect(await outcome("restarted")).toBe("KV_HANDSHAKE_REFUSED");
    expect(await outcome("restarted")).toBe("KV_HANDSHAKE_BACKED_OFF");
    failWith(undefined);
    expect(await outcome("restarted again")).toBe("ok");
  });

  it("closes a dropped peer when its last reference is released; later callers get a new peer at once", async () => {
    const { engines, log } = setUp();
    const first = await engines.open(at("e"));
    const second = await engines.open(at("e"));
    engines.drop(first.engine, "stale");
    expect(nameOf((await engines.open(at("e"))).engine)).toBe("e#2");
    expect(engines.outstanding()).toEqual({ peers: 1, opening: 0, closing: 1, references: 1 });
    first.release();
    first.release();
    await settle();
    expect(log).toEqual(["open e", "open e"]);
    second.release();
    await settle();
    expect(log).toEqual(["open e", "open e", "close e#1"]);
    expect(nameOf(engines.peek(at("e")))).toBe("e#2");
  });

  it("shakes hands beside an open peer for a later registration, and replaces the peer when its handshake has it", async () => {
    const answer = { registrationGeneration: 1, fingerprint: "one" };
    const { engines, log } = setUp({ answer });
    const named = (registrationGeneration: number) =>
      engines.open({ ...at("e"), registrationGeneration });
    (await named(1)).release();
    Object.assign(answer, { registrationGeneration: 2, fingerprint: "two" });
    (await named(1)).release();
    expect(log).toEqual(["open e"]);
    const [first, second] = await Promise.all([named(2), named(2)]);
    expect([nameOf(first?.engine), nameOf(second?.engine)]).toEqual(["e#2", "e#2"]);
    (await engines.open(at("e"))).release();
    await settle();
    expect(log).toEqual(["open e", "open e", "close e#1"]);
  });

  it("refuses a registration that the peer does not have, and keeps the peer for others", async () => {
    const { engines, clock, log } = setUp({
      answer: { registrationGeneration: 1, fingerprint: "one" },
    });
    const held = await engines.open({ ...at("e"), registrationGeneration: 1 });
    const wrong = engines.open({ ...at("e"), registrationGeneration: 2 ** 40 });
    wrong.catch(() => {});
    await settle();
    clock.advance(1000);
    await expect(wrong).rejects.toMatchObject({ code: "KV_GENERATION_STALE" });
    const again = await engines.open({ ...at("e"), registrationGeneration: 1 });
    expect(again.engine).toBe(held.engine);
    expect(log).toEqual(["open e", "open e", "close e#2", "open e", "close e#3"]);
  });

  it("keeps a peer whose handshake says no registration, when another handshake gives the same", async () => {
    const answer = { fingerprint: "one" };
    const { engines, clock, log } = setUp({ answer });
    const named = (registrationGeneration: number) =>
      engines.open({ ...at("e"), registrationGeneration });
    const first = await named(1);
    const forged = named(9);
    await settle();
    clock.advance(1000);
    expect((await forged).engine).toBe(first.engine);
    expect((await named(9)).engine).toBe(first.engine);
    expect(log).toEqual(["open e", "open e", "close e#2"]);
    answer.fingerprint = "two";
    const later = named(2);
    await settle();
    clock.advance(1000);
    expect(nameOf((await later).engine)).toBe("e#3");
  });

  it("keeps the peer, and does not back off, when a handshake beside it fails", async () => {
    const { engines, failWith } = setUp({
      answer: { registrationGeneration: 1, fingerprint: "one" },
    });
    const held = await engines.open(at("e"));
    failWith(new KvError("KV_SIDE_CHANNEL_TIMEOUT", "silent"));
    await expect(engines.open({ ...at("e"), registrationGeneration: 7 })).rejects.toMatchObject({
      code: "KV_SIDE_CHANNEL_TIMEOUT",
    });
    expect((await engines.open(at("e"))).engine).toBe(held.engine);
  });

  it("does not drop a peer's successor when the old peer is dropped again", async () => {
    const { engines } = setUp();
    const first = await engines.open(at("e"));
    first.release();
    engines.drop(first.engine, "stale");
    const second = await engines.open(at("e"));
    engines.drop(first.engine, "stale, reported late");
    expect(engines.peek(at("e"))).toBe(second.engine);
  });

  it("closes an engine that was not used for engine_ttl, but not one that is still referenced", async () => {
    const { engines, clock, log } = setUp({ engineTtlMs: 1000 });
    const used = await engines.open(at("used", 1));
    (await engines.open(at("idle", 2))).release();
    (await engines.open(at("beaten", 3))).release();
    clock.advance(600);
    engines.peek(at("beaten", 3));
    clock.advance(600);
    await settle();
    expect(log.filter((line) => line.startsWith("close"))).toEqual(["close idle#2"]);
    clock.advance(5000);
    await settle();
    expect(log.filter((line) => line.startsWith("close"))).toEqual([
      "close idle#2",
      "close beaten#3",
    ]);
    used.release();
    clock.advance(1000);
    await settle();
    expect(engines.outstanding()).toEqual({ peers: 0, opening: 0, closing: 0, references: 0 });
    expect(clock.pending()).toBe(0);
  });

  it("a request with a wrong host, port or TP size neither delays nor fails correct requests", async () => {
    const { engines, log, failWith, gate } = setUp();
    const open = gate();
    failWith(new KvError("KV_HANDSHAKE_REFUSED", "no such rank"));
    const wrong = [
      engines.open({ ...at("e"), host: "elsewhere" }),
      engines.open(at("e", 9)),
      engines.open({ ...at("e"), tpSize: 8 }),
    ];
    for (const each of wrong) each.catch(() => {});
    await settle();
    open();
    await settle();
    for (const each of wrong)
      await expect(each).rejects.toMatchObject({ code: "KV_HANDSHAKE_REFUSED" });
    failWith(undefined);
    expect((await engines.open(at("e"))).engine.address).toEqual(at("e"));
    expect(log.filter((line) => line === "open e").length).toBe(4);
  });

  it("stops waiting when the signal aborts, and releases a reference that arrives later", async () => {
    const { engines, gate, log } = setUp();
    const open = gate();
    const abort = new AbortController();
    const acquired = engines.acquire({ ...at("e"), requestId: "r" }, abort.signal);
    abort.abort(new Error("given up"));
    await expect(acquired).rejects.toThrow("given up");
    open();
    await settle();
    const peer = engines.peek(at("e"));
    if (peer === undefined) throw new Error("not open");
    engines.drop(peer, "test");
    await settle();
    expect(log).toEqual(["open e", "close e#1"]);
  });

  it("replaces an engine by another one at the same address", async () => {
    const { engines, log } = setUp();
    (await engines.open(at("old"))).release();
    (await engines.open(at("neighbour", 5601))).release();
    (await engines.open(at("new"))).release();
    await settle();
    expect(log).toEqual(["open old", "open neighbour", "open new", "close old#1"]);
  });

  it("close waits until all references are released, and refuses new callers", async () => {
    const { engines, log, gate, clock } = setUp({ engineTtlMs: 1000 });
    const held = await engines.open(at("e"));
    const open = gate();
    const opening = engines.open(at("f", 2));
    await settle();
    let done = false;
    const closing = engines.close().then(() => {
      done = true;
    });
    await expect(engines.open(at("g", 3))).rejects.toMatchObject({
      code: "KV_SIDE_CHANNEL_CLOSED",
    });
    await settle();
    expect(done).toBe(false);
    held.release();
    open();
    (await opening).release();
    await closing;
    expect(log).toEqual(["open e", "open f", "close e#1", "close f#2"]);
    expect(clock.pending()).toBe(0);
  });
});
