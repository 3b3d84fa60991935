import { KvError } from "@kv/interface";
import { encodeMsgpack } from "@kv/protocol";
import { zmqSideChannel } from "@kv/side-channel";
import { recordedLog } from "@kv/testing/recorded-log";
import { expect, it, test, vi } from "vitest";
import { BLOCK_BYTES, keyOf, readFills, tierScene } from "./members.js";

const { member, peer } = tierScene();
const slow = tierScene({
  latency: {
    latencyMs: 1,
    jitterMs: 0,
    bytesPerMs: BLOCK_BYTES / 100,
    minPieces: 4,
    lingerMs: 200,
  },
});
/** A peer that has a connection to a member. */
async function dialed(to: string) {
  const stranger = await peer();
  await stranger.dial(to);
  return stranger;
}

it("reads the blocks of a prefix up to the first that the peer lacks, in rounds of the landing blocks", async () => {
  const a = await member(10);
  const b = await member(100, { landingBlocks: 2 });
  for (let slot = 0; slot < 6; slot += 1) a.store.slots.set(`block-${slot}`, slot);

  const names = ["block-3", "block-1", "block-2", "block-0", "block-5", "none", "block-4"];
  expect(await readFills(b.tier, a.tier.localId, names)).toEqual([13, 11, 12, 10, 15]);
  expect(await readFills(b.tier, a.tier.localId, ["none"])).toEqual([]);

  await vi.waitFor(() => expect(a.store.pinned).toBe(0));
  expect(a.tier.peers).toEqual([b.tier.localId]);
});

it("serves and reads over the same session", async () => {
  const a = await member(10);
  const b = await member(100);
  a.store.slots.set("of-a", 1);
  b.store.slots.set("of-b", 2);
  const reads = await Promise.all([
    readFills(a.tier, b.tier.localId, ["of-b"]),
    readFills(b.tier, a.tier.localId, ["of-a"]),
  ]);
  expect(reads).toEqual([[102], [11]]);
  await vi.waitFor(() => expect(a.store.pinned + b.store.pinned).toBe(0));
});

test.each([
  ["fingerprint", { fingerprint: "another" }, "config_fingerprint"],
  ["seed", { hashSeed: "0" }, "hash_seed"],
  ["length of blocks", { blockLengthBytes: 2048 }, "block_len"],
])("refuses a peer with another %s, and says which", async (_, options, field) => {
  const { log, events } = recordedLog();
  const a = await member(0, { log });
  const b = await member(0, options);
  await expect(readFills(b.tier, a.tier.localId, ["x"])).rejects.toThrow(KvError);
  expect(events.map(({ fields }) => String(fields["error"])).join()).toContain(field);
  await vi.waitFor(() => expect(a.tier.peers).toEqual([]));
});

it("sends a stranger no metadata: not without a fingerprint, not with a wrong one", async () => {
  const a = await member();
  for (const given of [{ config_fingerprint: undefined }, { config_fingerprint: "x" }]) {
    const stranger = await dialed(a.tier.localId);
    stranger.connect(given);
    await vi.waitFor(() => expect(stranger.types()).toEqual(["disconnect"]));
  }
});

it.each([
  ["a look-up", { type: "lookup", kv_request_id: "r", keys: [keyOf("x")], round_seq: 0 }],
  ["a fetch", { type: "fetch", kv_request_id: "r", keys: [], block_indexes: [], round_seq: 0 }],
  ["an acknowledgement", { type: "connect_ack", peer_id: "127.0.0.1:1" }],
  ["an unknown message", { type: "fly" }],
])("ends the session at %s before the handshake", async (_, message) => {
  const a = await member();
  const stranger = await dialed(a.tier.localId);
  stranger.send(message);
  await vi.waitFor(() => expect(stranger.types()).toEqual(["disconnect"]));
});

it("refuses a peer that gives another name than its connection has", async () => {
  const a = await member();
  const stranger = await dialed(a.tier.localId);
  stranger.connect({ peer_id: "127.0.0.1:9" });
  await vi.waitFor(() => expect(stranger.types()).toEqual(["disconnect"]));
});

it("does not take messages from a second connection under a peer's name", async () => {
  const a = await member(10);
  const b = await member(100);
  a.store.slots.set("x", 1);
  expect(await readFills(b.tier, a.tier.localId, ["x"])).toEqual([11]);

  const sideChannel = zmqSideChannel();
  const [host = "", port] = a.tier.localId.split(":");
  const spoofed = sideChannel.dial({ host, port: Number(port), identity: b.tier.localId });
  await new Promise<void>((resolve) => {
    spoofed.onEstablished = resolve;
  });
  spoofed.send([encodeMsgpack({ type: "disconnect" })]);
  await new Promise((resolve) => setTimeout(resolve, 50));
  expect(a.tier.peers).toEqual([b.tier.localId]);
  expect(await readFills(b.tier, a.tier.localId, ["x"])).toEqual([11]);
  spoofed.close();
  await sideChannel.close();
});

it("ends a read when it is aborted, and gives everything back on both sides", async () => {
  const a = await member(10);
  const b = await member(100);
  a.store.slots.set("x", 1);
  let resume = () => {};
  a.store.ready = new Promise((resolve) => {
    resume = resolve;
  });
  const abort = new AbortController();
  const read = readFills(b.tier, a.tier.localId, ["x"], abort.signal);
  setTimeout(() => abort.abort(new Error("not wanted")), 50);
  setTimeout(resume, 100);
  await expect(read).rejects.toMatchObject({ code: "KV_TRANSFER_ABORTED" });
  await vi.waitFor(() => expect(a.store.pinned).toBe(0));
  a.store.ready = Promise.resolve();
  expect(await readFills(b.tier, a.tier.localId, ["x"])).toEqual([11]);
});

it("rejects a read when the peer ends, politely or not, and connects again later", async () => {
  const a = await member(10);
  const b = await member(100);
  a.store.slots.set("x", 1);
  expect(await readFills(b.tier, a.tier.localId, ["x"])).toEqual([11]);
  a.store.ready = new Promise(() => {});
  const read = readFills(b.tier, a.tier.localId, ["x"]);
  const rejected = expect(read).rejects.toMatchObject({ code: "KV_PEER_DISCONNECTED" });
  await new Promise((resolve) => setTimeout(resolve, 30));
  await a.tier.close();
  await rejected;
  await vi.waitFor(() => expect(b.tier.peers).toEqual([]));
});

it("reuses no block of an aborted fetch before the peer has acknowledged it", async () => {
  const a = await slow.member();
  const b = await slow.member(100, { landingBlocks: 1 });
  a.store.slots.set("x", 1);
  a.store.slots.set("y", 2);
  const abort = new AbortController();
  const read = readFills(b.tier, a.tier.localId, ["x"], abort.signal);
  await vi.waitFor(() => expect(a.store.pinned).toBe(1));
  await new Promise((resolve) => setTimeout(resolve, 50));
  abort.abort();
  await expect(read).rejects.toMatchObject({ code: "KV_TRANSFER_ABORTED" });
  expect(a.store.pinned).toBe(1);
  expect(await readFills(b.tier, a.tier.localId, ["y"])).toEqual([12]);
  await vi.waitFor(() => expect(a.store.pinned).toBe(0));
});
