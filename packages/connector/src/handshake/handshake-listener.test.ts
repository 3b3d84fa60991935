import { KvError, type SideChannel, silentLog } from "@kv/interface";
import {
  decodeHandshakeRefusal,
  decodeHandshakeReply,
  decodeLeaseReply,
  encodeHandshakePayload,
  encodeHandshakeRequest,
  encodeLeaseQuery,
  encodeMsgpack,
} from "@kv/protocol";
import { manualClock } from "@kv/testing/manual-clock";
import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { openHandshakeListener, type RankPayload } from "./handshake-listener.js";

type Answer = (
  frames: readonly Uint8Array[],
) => Promise<readonly Uint8Array[] | undefined> | readonly Uint8Array[] | undefined;

/** A side channel without a network. Tests call the `answer` functions of its listeners directly. */
function stubSideChannel(takenPorts: readonly number[] = []) {
  const open = new Map<number, Answer>();
  const sideChannel: SideChannel = {
    async listen({ host, port, answer }) {
      if (takenPorts.includes(port)) throw new KvError("KV_SIDE_CHANNEL_BIND_FAILED", `${port} is taken`);
      open.set(port, answer);
      return { host, port, close: async () => void open.delete(port) };
    },
    request: () => Promise.reject(new Error("not here")),
    close: async () => {},
  };
  return { sideChannel, open };
}

const payload = (name: string): Uint8Array =>
  encodeHandshakePayload({
    compatibilityHash: name,
    agentMetadataBytes: new TextEncoder().encode(name),
    rest: {},
  });
const ranks: RankPayload[] = [
  { ppRank: 0, tpRank: 0, payload: payload("rank 0") },
  { ppRank: 0, tpRank: 1, payload: payload("rank 1") },
];

async function setUp({ ports = [5600], taken = [] as number[] } = {}) {
  const clock = manualClock(1234.5);
  const { sideChannel, open } = stubSideChannel(taken);
  const warnings: string[] = [];
  const listener = await openHandshakeListener({
    sideChannel,
    clock,
    log: { ...silentLog, warn: (event) => void warnings.push(event) },
    host: "p",
    ports,
    payloads: ranks,
    lease: ({ requestId }) => ({ incarnation: "me", held: requestId === "held" }),
  });
  const ask = async (...frames: Uint8Array[]) => open.get(ports[0] ?? 0)?.(frames);
  return { clock, listener, ask, open, warnings };
}

describe("handshake listener", () => {
  it("serves each rank's payload, and its clock in seconds", async () => {
    const { ask, clock } = await setUp();
    for (const tpRank of [0, 1]) {
      const frames = (await ask(encodeHandshakeRequest({ ppRank: 0, tpRank }))) ?? [];
      expect(frames.length).toBe(2);
      const { payload: got, clockSeconds } = decodeHandshakeReply(frames);
      expect(got.compatibilityHash).toBe(`rank ${tpRank}`);
      expect(clockSeconds).toBe(clock.now() / 1000);
      // The clock is a msgpack float even when it is a whole number: vLLM's msgspec refuses an integer.
      expect(frames[1]?.[0]).toBe(0xcb);
    }
  });

  it("refuses an unknown rank in a one-frame reply, and keeps serving", async () => {
    const { ask, warnings } = await setUp();
    const frames = (await ask(encodeHandshakeRequest({ ppRank: 0, tpRank: 7 }))) ?? [];
    expect(decodeHandshakeRefusal(frames)).toContain("tp 7");
    expect(warnings).toEqual(["handshake-for-unknown-rank"]);
    expect(await ask(encodeHandshakeRequest({ ppRank: 0, tpRank: 0 }))).toHaveLength(2);
  });

  it("answers the lease queries of our own peers", async () => {
    const { ask } = await setUp();
    for (const requestId of ["held", "gone"]) {
      const question = encodeLeaseQuery({ engineId: "p", requestId, generation: 1 });
      expect(decodeLeaseReply((await ask(question)) ?? [])).toEqual({
        incarnation: "me",
        held: requestId === "held",
      });
    }
  });

  it("logs 50,000 malformed requests and unknown ranks in two lines per reason and ten seconds", async () => {
    const { ask, warnings, clock } = await setUp();
    const unknown = encodeHandshakeRequest({ ppRank: 0, tpRank: 7 });
    for (let n = 0; n < 25_000; n++) {
      await ask(new Uint8Array([0xc1, n & 0xff]));
      await ask(unknown);
    }
    clock.advance(10_000);
    expect(warnings.sort()).toEqual([
      ...["handshake-for-unknown-rank", "handshake-for-unknown-rank"],
      ...["handshake-request-refused", "handshake-request-refused"],
    ]);
  });

  it("does not answer malformed requests, and serves the next valid one", async () => {
    const { ask } = await setUp();
    const good = encodeHandshakeRequest({ ppRank: 0, tpRank: 0 });
    const near = [
      encodeMsgpack(["get_meta_msg", 0, 0]),
      encodeMsgpack([new TextEncoder().encode("get_meta_msg"), -1, 0]),
      encodeMsgpack([new TextEncoder().encode("get_meta_msg"), 0, 1.5]),
      encodeMsgpack([new TextEncoder().encode("get_meta_msg"), 0]),
      encodeMsgpack([new TextEncoder().encode("get_meta_msg"), 0, 0, 0]),
      encodeMsgpack({ kv: "lease_check" }),
      new Uint8Array(0),
      new Uint8Array(2_000_000),
      new Uint8Array(5000).fill(0x91),
    ];
    for (const frame of near) expect(await ask(frame)).toBeUndefined();
    expect(await ask()).toBeUndefined();
    expect(await ask(good, good)).toBeUndefined();
    await fc.assert(
      fc.asyncProperty(fc.array(fc.uint8Array({ maxLength: 80 }), { maxLength: 4 }), async (frames) => {
        const reply = await ask(...frames);
        expect(reply === undefined || reply.length > 0).toBe(true);
      }),
      { numRuns: 500 },
    );
    // Flips each bit of a valid request: the listener may answer or not, but never throws.
    for (let bit = 0; bit < good.length * 8; bit++) {
      const flipped = good.slice();
      flipped[bit >> 3] = (flipped[bit >> 3] ?? 0) ^ (1 << (bit & 7));
      await ask(flipped);
    }
    expect(await ask(good)).toHaveLength(2);
  });

  it("counts registrations: new and changed payloads, not repeated ones", async () => {
    const { listener } = await setUp();
    expect(listener.registrationGeneration).toBe(2);
    listener.publish(ranks);
    expect(listener.registrationGeneration).toBe(2);
    listener.publish([{ ppRank: 0, tpRank: 1, payload: payload("rank 1 again") }]);
    expect(listener.registrationGeneration).toBe(3);
  });

  it("opens all ports or none, each serving every rank", async () => {
    const { open, listener } = await setUp({ ports: [5600, 5601] });
    expect([...open.keys()]).toEqual([5600, 5601]);
    expect(listener.port).toBe(5600);
    const request = encodeHandshakeRequest({ ppRank: 0, tpRank: 1 });
    expect(await open.get(5601)?.([request])).toHaveLength(2);
    await listener.close();
    expect(open.size).toBe(0);
    expect(listener.listeners).toBe(0);

    const { sideChannel, open: partly } = stubSideChannel([5601]);
    const refused = openHandshakeListener({
      sideChannel,
      clock: manualClock(),
      log: silentLog,
      host: "p",
      ports: [5600, 5601],
      payloads: ranks,
    });
    await expect(refused).rejects.toMatchObject({ code: "KV_SIDE_CHANNEL_BIND_FAILED" });
    expect(partly.size).toBe(0);
  });
});
