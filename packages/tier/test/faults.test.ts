import { manualClock } from "@kv/testing/manual-clock";
import { describe, expect, it, vi } from "vitest";
import { BLOCK_BYTES, keyOf, type Member, type Peer, readFills, tierScene } from "./members.js";

// A peer that ends, repeats itself, says nothing or does not read, in each phase of a session.

/** A WRITE of a block takes a quarter of a second. */
const { member, peer } = tierScene({
  latency: { latencyMs: 1, jitterMs: 0, bytesPerMs: BLOCK_BYTES / 250, minPieces: 4, lingerMs: 1 },
});

const LOOKUP = { type: "lookup", kv_request_id: "r", keys: [keyOf("x")], round_seq: 0 };
const FETCH = {
  type: "fetch",
  kv_request_id: "r",
  keys: [keyOf("x")],
  block_indexes: [2],
  round_seq: 0,
};

/** What a client has said when it ends. */
const CLIENT_PHASES = {
  "before it announces itself": async () => {},
  "after the handshake": async (client: Peer) => {
    client.connect();
    await client.got("connect_ack");
    client.send({ type: "connect_ack", peer_id: client.peerId });
  },
  "with blocks that were found for it": async (client: Peer, one: Member) => {
    await CLIENT_PHASES["after the handshake"](client);
    client.send(LOOKUP);
    await vi.waitFor(() => expect(one.store.pinned).toBe(1));
  },
  "while a WRITE fills its blocks": async (client: Peer, one: Member) => {
    await CLIENT_PHASES["after the handshake"](client);
    client.send(FETCH);
    await vi.waitFor(() => expect(one.store.pinned).toBe(1));
    await new Promise((resolve) => setTimeout(resolve, 50));
  },
} as const;

/** What a server has heard when it ends. */
const SERVER_PHASES = {
  "before the handshake": async () => {},
  "after a look-up": async (server: Peer) => {
    server.connect();
    server.send({ type: "connect_ack", peer_id: server.peerId });
    await server.got("lookup");
  },
  "after a fetch": async (server: Peer) => {
    await SERVER_PHASES["after a look-up"](server);
    const { kv_request_id, keys } = await server.got("lookup");
    server.send({ type: "lookup_resp", kv_request_id, keys, hits: [true] });
    await server.got("fetch");
  },
} as const;

describe.each(["politely", "by force"] as const)("a peer that ends %s", (how) => {
  it.each(Object.entries(CLIENT_PHASES))("%s: nothing is held for it", async (_, phase) => {
    const one = await member();
    one.store.slots.set("x", 1);
    const client = await peer();
    await client.dial(one.tier.localId);
    await phase(client, one);
    client.end(how);
    await vi.waitFor(() => expect(one.tier.peers).toEqual([]), { timeout: 5000 });
    await vi.waitFor(() => expect(one.store.pinned).toBe(0), { timeout: 5000 });
  });

  it.each(Object.entries(SERVER_PHASES))("%s: the read of it is rejected", async (_, phase) => {
    const one = await member(10, { landingBlocks: 1 });
    const server = await peer();
    const read = readFills(one.tier, server.peerId, ["x"]);
    const rejected = expect(read).rejects.toMatchObject({ code: "KV_PEER_DISCONNECTED" });
    await server.dial(one.tier.localId);
    await server.got("lookup_resp");
    await phase(server);
    server.end(how);
    await rejected;
    await vi.waitFor(() => expect(one.tier.peers).toEqual([]));
  });
});

describe("a message that comes twice", () => {
  it.each([
    ["connect", [], false],
    ["connect_ack", [], true],
    ["lookup", [LOOKUP, LOOKUP], true],
    ["fetch", [FETCH, FETCH], false],
    ["fetch of nothing", [LOOKUP, { ...FETCH, keys: [], block_indexes: [] }], true],
    ["abort_fetch", [{ type: "abort_fetch", kv_request_id: "r", round_seq: 0 }], true],
    ["transfer_done", [{ ...LOOKUP, type: "transfer_done", success: true }], true],
    ["lookup_resp", [{ ...LOOKUP, type: "lookup_resp", hits: [true] }], true],
  ] as const)(
    "%s: ends the session or changes nothing, and leaks nothing",
    async (what, messages, lives) => {
      const one = await member();
      one.store.slots.set("x", 1);
      const client = await peer();
      await client.dial(one.tier.localId);
      client.connect();
      if (what === "connect") client.connect();
      else {
        await client.got("connect_ack");
        client.send({ type: "connect_ack", peer_id: client.peerId });
        if (what === "connect_ack") client.send({ type: "connect_ack", peer_id: client.peerId });
      }
      for (const message of messages) client.send(message);
      if (messages.length === 1) client.send(messages[0]);
      if (lives) {
        // The session still serves.
        client.send({ ...LOOKUP, kv_request_id: "other" });
        await vi.waitFor(() => expect(client.types()).toContain("lookup_resp"));
        expect(one.tier.peers).toEqual([client.peerId]);
        client.end("politely");
      }
      await vi.waitFor(() => expect(one.tier.peers).toEqual([]), { timeout: 5000 });
      await vi.waitFor(() => expect(one.store.pinned).toBe(0), { timeout: 5000 });
    },
  );
});

describe("a message that is lost", () => {
  it("the acknowledgement of a handshake: the read is rejected after 30 s", async () => {
    const clock = manualClock();
    const one = await member(10, { clock });
    const server = await peer();
    const read = readFills(one.tier, server.peerId, ["x"]);
    const rejected = expect(read).rejects.toMatchObject({ code: "KV_PEER_DISCONNECTED" });
    await server.dial(one.tier.localId);
    await server.got("lookup_resp");
    server.connect();
    await server.got("connect");
    clock.advance(30_000);
    await rejected;
  });
});

it("a peer that says that it has a block, and has not: the read is rejected, the session stays", async () => {
  const one = await member(10, { landingBlocks: 1 });
  const server = await peer();
  const read = readFills(one.tier, server.peerId, ["x"]);
  const rejected = expect(read).rejects.toMatchObject({ code: "KV_TRANSFER_FAILED" });
  await server.dial(one.tier.localId);
  await server.got("lookup_resp");
  await SERVER_PHASES["after a fetch"](server);
  const { kv_request_id, round_seq } = await server.got("fetch");
  // Of a round that nobody asked for.
  server.send({ type: "transfer_done", kv_request_id, round_seq: 7, success: true });
  server.send({ type: "transfer_done", kv_request_id, round_seq, success: false });
  await rejected;
  expect(one.tier.peers).toEqual([server.peerId]);

  // The only landing block is free again.
  const other = await member();
  other.store.slots.set("y", 2);
  expect(await readFills(one.tier, other.tier.localId, ["y"])).toEqual([12]);
  server.end("politely");
  await vi.waitFor(() => expect(one.tier.peers).toEqual([other.tier.localId]));
});

it("ends the session of a peer that asks and does not read", { timeout: 60_000 }, async () => {
  const one = await member();
  const slow = await peer({ answer: () => new Promise(() => {}) });
  await slow.dial(one.tier.localId);
  slow.connect();
  await vi.waitFor(() => expect(one.tier.peers).toEqual([slow.peerId]));
  slow.send({ type: "connect_ack", peer_id: slow.peerId });
  const keys = Array.from({ length: 60_000 }, (_, at) => keyOf(String(at).padStart(32)));
  for (let round = 0; round < 40; round += 1) slow.send({ ...LOOKUP, keys, round_seq: round });
  await vi.waitFor(() => expect(one.tier.peers).toEqual([]), { timeout: 50_000, interval: 100 });
});
