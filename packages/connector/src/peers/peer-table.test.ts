import { KvError, silentLog } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { describe, expect, it } from "vitest";
import type { EngineAddress } from "./engine-address.js";
import { PeerTable } from "./peer-table.js";

interface FakePeer {
  readonly address: EngineAddress;
  readonly name: string;
  readonly registrationGeneration?: number | undefined;
  readonly fingerprint?: string | undefined;
}

function setUp({
  engineTtlMs = 0,
  answer = {} as Pick<FakePeer, "registrationGeneration" | "fingerprint">,
} = {}) {
  const clock = manualClock();
  const log: string[] = [];
  let fail: KvError | undefined;
  const gates: (() => void)[] = [];
  let gated = false;
  let opened = 0;
  const peers = new PeerTable<FakePeer>({
    clock,
    log: silentLog,
    metrics: { handshakeFailed: () => void log.push("handshake failed") },
    failureType: "handshake_failed",
    engineTtlMs,
    async open(address) {
      const { engineId } = address;
      log.push(`open ${engineId}`);
      if (gated) await new Promise<void>((resolve) => gates.push(resolve));
      if (fail !== undefined) throw fail;
      opened += 1;
      return { address, name: `${engineId}#${opened}`, ...answer };
    },
    async close(peer) {
      log.push(`close ${peer.name}`);
    },
  });
  return {
    clock,
    log,
    peers,
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

const at = (engineId: string, port = 5600): EngineAddress => ({
  engineId,
  host: "p",
  port,
  tpSize: 1,
  dcpSize: 1,
  ppSize: 1,
});
const settle = async () => {
  for (let i = 0; i < 20; i++) await Promise.resolve();
};

describe("PeerTable", () => {
  it("opens an engine once for concurrent callers", async () => {
    const { peers, log } = setUp();
    const [a, b] = await Promise.all([peers.acquire(at("e")), peers.acquire(at("e"))]);
    expect(a?.peer).toBe(b?.peer);
    expect(log).toEqual(["open e"]);
    expect(peers.peek(at("e"))).toBe(a?.peer);
    expect(peers.peek(at("other"))).toBeUndefined();
  });

  it("backs off from 1 s to 60 s, doubling after each failure; a success resets the delay", async () => {
    const { peers, clock, log, failWith } = setUp();
    failWith(new KvError("KV_HANDSHAKE_REFUSED", "no"));
    for (const delayMs of [1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000]) {
      await expect(peers.acquire(at("e"))).rejects.toMatchObject({ code: "KV_HANDSHAKE_REFUSED" });
      await expect(peers.acquire(at("e"))).rejects.toMatchObject({ code: "KV_HANDSHAKE_BACKED_OFF" });
      clock.advance(delayMs - 1);
      await expect(peers.acquire(at("e"))).rejects.toMatchObject({ code: "KV_HANDSHAKE_BACKED_OFF" });
      clock.advance(1);
    }
    expect(log.filter((line) => line.startsWith("open")).length).toBe(8);
    failWith(undefined);
    const hold = await peers.acquire(at("e"));
    hold.release();
    peers.drop(hold.peer, "test");
    await settle();
    failWith(new KvError("KV_HANDSHAKE_REFUSED", "no"));
    await expect(peers.acquire(at("e"))).rejects.toMatchObject({ code: "KV_HANDSHAKE_REFUSED" });
    clock.advance(1000);
    await expect(peers.acquire(at("e"))).rejects.toMatchObject({ code: "KV_HANDSHAKE_REFUSED" });
  });

  it("closes a dropped peer when its last reference is released; later callers get a new peer at once", async () => {
    const { peers, log } = setUp();
    const first = await peers.acquire(at("e"));
    const second = await peers.acquire(at("e"));
    peers.drop(first.peer, "stale");
    expect((await peers.acquire(at("e"))).peer.name).toBe("e#2");
    expect(peers.outstanding()).toEqual({ peers: 1, opening: 0, closing: 1 });
    first.release();
    first.release();
    await settle();
    expect(log).toEqual(["open e", "open e"]);
    second.release();
    await settle();
    expect(log).toEqual(["open e", "open e", "close e#1"]);
    expect(peers.peek(at("e"))?.name).toBe("e#2");
  });

  it("shakes hands beside an open peer for a later registration, and replaces the peer when its handshake has it", async () => {
    const answer = { registrationGeneration: 1, fingerprint: "one" };
    const { peers, log } = setUp({ answer });
    const named = (registrationGeneration: number) => peers.acquire({ ...at("e"), registrationGeneration });
    (await named(1)).release();
    Object.assign(answer, { registrationGeneration: 2, fingerprint: "two" });
    (await named(1)).release();
    expect(log).toEqual(["open e"]);
    const [first, second] = await Promise.all([named(2), named(2)]);
    expect([first?.peer.name, second?.peer.name]).toEqual(["e#2", "e#2"]);
    (await peers.acquire(at("e"))).release();
    await settle();
    expect(log).toEqual(["open e", "open e", "close e#1"]);
  });

  it("refuses a registration that the peer does not have, and keeps the peer for others", async () => {
    const { peers, clock, log } = setUp({ answer: { registrationGeneration: 1, fingerprint: "one" } });
    const held = await peers.acquire({ ...at("e"), registrationGeneration: 1 });
    const wrong = peers.acquire({ ...at("e"), registrationGeneration: 2 ** 40 });
    wrong.catch(() => {});
    await settle();
    clock.advance(1000);
    await expect(wrong).rejects.toMatchObject({ code: "KV_GENERATION_STALE" });
    const again = await peers.acquire({ ...at("e"), registrationGeneration: 1 });
    expect(again.peer).toBe(held.peer);
    expect(log).toEqual(["open e", "open e", "close e#2", "open e", "close e#3"]);
  });

  it("keeps a peer whose handshake says no registration, when another handshake gives the same", async () => {
    const answer = { fingerprint: "one" };
    const { peers, clock, log } = setUp({ answer });
    const named = (registrationGeneration: number) => peers.acquire({ ...at("e"), registrationGeneration });
    const first = await named(1);
    const forged = named(9);
    await settle();
    clock.advance(1000);
    expect((await forged).peer).toBe(first.peer);
    expect((await named(9)).peer).toBe(first.peer);
    expect(log).toEqual(["open e", "open e", "close e#2"]);
    answer.fingerprint = "two";
    const later = named(2);
    await settle();
    clock.advance(1000);
    expect((await later).peer.name).toBe("e#3");
  });

  it("keeps the peer, and does not back off, when a handshake beside it fails", async () => {
    const { peers, failWith } = setUp({ answer: { registrationGeneration: 1, fingerprint: "one" } });
    const held = await peers.acquire(at("e"));
    failWith(new KvError("KV_SIDE_CHANNEL_TIMEOUT", "silent"));
    await expect(peers.acquire({ ...at("e"), registrationGeneration: 7 })).rejects.toMatchObject({
      code: "KV_SIDE_CHANNEL_TIMEOUT",
    });
    expect((await peers.acquire(at("e"))).peer).toBe(held.peer);
  });

  it("does not drop a peer's successor when the old peer is dropped again", async () => {
    const { peers } = setUp();
    const first = await peers.acquire(at("e"));
    first.release();
    peers.drop(first.peer, "stale");
    const second = await peers.acquire(at("e"));
    peers.drop(first.peer, "stale, reported late");
    expect(peers.peek(at("e"))).toBe(second.peer);
  });

  it("closes an engine that was not used for engine_ttl, but not one that is still referenced", async () => {
    const { peers, clock, log } = setUp({ engineTtlMs: 1000 });
    const used = await peers.acquire(at("used", 1));
    (await peers.acquire(at("idle", 2))).release();
    (await peers.acquire(at("beaten", 3))).release();
    clock.advance(600);
    peers.peek(at("beaten", 3));
    clock.advance(600);
    await settle();
    expect(log.filter((line) => line.startsWith("close"))).toEqual(["close idle#2"]);
    clock.advance(5000);
    await settle();
    expect(log.filter((line) => line.startsWith("close"))).toEqual(["close idle#2", "close beaten#3"]);
    used.release();
    clock.advance(1000);
    await settle();
    expect(peers.outstanding()).toEqual({ peers: 0, opening: 0, closing: 0 });
    expect(clock.pending()).toBe(0);
  });

  it("a request with a wrong host, port or TP size neither delays nor fails correct requests", async () => {
    const { peers, log, failWith, gate } = setUp();
    const open = gate();
    failWith(new KvError("KV_HANDSHAKE_REFUSED", "no such rank"));
    const wrong = [
      peers.acquire({ ...at("e"), host: "elsewhere" }),
      peers.acquire(at("e", 9)),
      peers.acquire({ ...at("e"), tpSize: 8 }),
    ];
    for (const each of wrong) each.catch(() => {});
    await settle();
    open();
    await settle();
    for (const each of wrong) await expect(each).rejects.toMatchObject({ code: "KV_HANDSHAKE_REFUSED" });
    failWith(undefined);
    expect((await peers.acquire(at("e"))).peer.address).toEqual(at("e"));
    expect(log.filter((line) => line === "open e").length).toBe(4);
  });

  it("stops waiting when the signal aborts, and releases a reference that arrives later", async () => {
    const { peers, gate, log } = setUp();
    const open = gate();
    const abort = new AbortController();
    const acquired = peers.acquire(at("e"), abort.signal);
    abort.abort(new Error("given up"));
    await expect(acquired).rejects.toThrow("given up");
    open();
    await settle();
    const peer = peers.peek(at("e"));
    if (peer === undefined) throw new Error("not open");
    peers.drop(peer, "test");
    await settle();
    expect(log).toEqual(["open e", "close e#1"]);
  });

  it("replaces an engine by another one at the same address", async () => {
    const { peers, log } = setUp();
    (await peers.acquire(at("old"))).release();
    (await peers.acquire(at("neighbour", 5601))).release();
    (await peers.acquire(at("new"))).release();
    await settle();
    expect(log).toEqual(["open old", "open neighbour", "open new", "close old#1"]);
  });

  it("close waits until all references are released, and refuses new callers", async () => {
    const { peers, log, gate, clock } = setUp({ engineTtlMs: 1000 });
    const held = await peers.acquire(at("e"));
    const open = gate();
    const opening = peers.acquire(at("f", 2));
    await settle();
    let done = false;
    const closing = peers.close().then(() => {
      done = true;
    });
    await expect(peers.acquire(at("g", 3))).rejects.toMatchObject({ code: "KV_SIDE_CHANNEL_CLOSED" });
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
