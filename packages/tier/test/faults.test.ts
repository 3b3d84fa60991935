import { encodeMsgpack } from "@kv/protocol";
import { type ZmqConnection, zmqSideChannel } from "@kv/side-channel";
import { manualClock } from "@kv/testing/manual-clock";
import { memoryNetwork, memoryTransport } from "@kv/transport-memory";
import { afterEach, describe, expect, it, vi } from "vitest";
import { decodeMessage, type TierMessage } from "../src/messages.js";
import { BLOCK_BYTES, keyOf, NAMESPACE, openMember, readFills } from "./members.js";

// A peer that ends, repeats itself, says nothing or does not read, in each phase of a session.

/** A WRITE of a block takes a quarter of a second. */
const network = memoryNetwork({
  latency: { latencyMs: 1, jitterMs: 0, bytesPerMs: BLOCK_BYTES / 250, minPieces: 4, lingerMs: 1 },
});
const open: { close(): Promise<void> }[] = [];
let hosts = 0;

async function member(options: Parameters<typeof openMember>[3] = {}) {
  hosts += 1;
  const opened = await openMember(network, `host-${hosts}`, 10, options);
  open.push(opened);
  return opened;
}

afterEach(async () => {
  for (const { close } of open.splice(0).reverse()) await close();
  expect(Object.values(network.outstanding()).reduce((sum, held) => sum + held, 0)).toBe(0);
});

/** A peer with memory of its own, which says what a test tells it to. */
async function peer(given: { answer?: () => Promise<undefined> | undefined } = {}) {
  hosts += 1;
  const transport = memoryTransport({ network, host: `peer-${hosts}` });
  const agent = await transport.createAgent();
  const memory = transport.allocate(4 * BLOCK_BYTES);
  const registration = await agent.register(memory);
  const sideChannel = zmqSideChannel({ maxRequestBytes: 8 * 2 ** 20 });
  const received: TierMessage[] = [];
  const listener = await sideChannel.listen({
    host: "127.0.0.1",
    port: 0,
    answer: ([bytes]) => {
      if (bytes !== undefined) received.push(decodeMessage(bytes));
      return given.answer?.();
    },
  });
  const peerId = `127.0.0.1:${listener.port}`;
  let dialed: ZmqConnection | undefined;
  open.push({
    async close() {
      dialed?.close();
      await sideChannel.close();
      await registration.close();
      await agent.close();
      memory.close();
      await transport.close();
    },
  });
  const send = (message: object) => dialed?.send([encodeMsgpack(message)]);
  const metadata = await agent.localMetadata();
  return {
    peerId,
    send,
    types: () => received.map(({ type }) => type),
    /** Waits for a message. */
    async got<Type extends TierMessage["type"]>(type: Type) {
      const found = () => received.find((message) => message.type === type);
      await vi.waitFor(() => expect(found()).toBeDefined(), { timeout: 5000 });
      return found() as Extract<TierMessage, { type: Type }>;
    },
    async dial(to: string): Promise<void> {
      const [host = "", port] = to.split(":");
      dialed = sideChannel.dial({ host, port: Number(port), identity: peerId });
      const connection = dialed;
      await new Promise<void>((resolve) => {
        connection.onEstablished = resolve;
      });
    },
    connect: () =>
      send({
        type: "connect",
        peer_id: peerId,
        agent_metadata: metadata,
        base_addr: memory.address,
        num_blocks: 4,
        block_len: BLOCK_BYTES,
        config_fingerprint: NAMESPACE.fingerprint,
        hash_seed: NAMESPACE.hashSeed,
      }),
    end(how: "politely" | "by force"): void {
      if (how === "politely") send({ type: "disconnect" });
      else void Promise.all([dialed?.close(), sideChannel.close()]);
    },
    memory,
  };
}

type Peer = Awaited<ReturnType<typeof peer>>;
type Member = Awaited<ReturnType<typeof member>>;

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
    const one = await member({ landingBlocks: 1 });
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
    const one = await member({ clock });
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
  const one = await member({ landingBlocks: 1 });
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
