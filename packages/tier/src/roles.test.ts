import { silentLog, type Transfer, type TransferResult } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { expect, it, vi } from "vitest";
import { ClientRole } from "./client-role.js";
import type { TierMessage } from "./messages.js";
import { ServerRole } from "./server-role.js";

// What vLLM's session does after a time, on a clock that a test moves.

const KEYS = [new Uint8Array(36).fill(1), new Uint8Array(36).fill(2)];
const flush = () => new Promise((resolve) => setImmediate(resolve));

/** A transfer that ends when a test says so. */
function heldTransfer() {
  let end = () => {};
  let release = () => {};
  let fail: (error: Error) => void = () => {};
  const released = new Promise<void>((resolve) => {
    release = resolve;
  });
  const done = new Promise<TransferResult>((resolve, reject) => {
    fail = reject;
    end = () => resolve({ lengthBytes: 1, descriptorCount: 1, postMs: 0, transferMs: 0 });
  });
  done.catch(() => {});
  return { transfer: { done, released } satisfies Transfer, end, release, fail };
}

function server(maxPinnedBlocks = 10) {
  const clock = manualClock();
  const sent: TierMessage[] = [];
  const pinned = new Set<number>();
  const held = heldTransfer();
  const signals: AbortSignal[] = [];
  let pin: (keys: readonly Uint8Array[]) => Promise<(number | undefined)[]> = async (keys) =>
    keys.map((key) => {
      pinned.add(key[0] ?? 0);
      return key[0];
    });
  const role = new ServerRole({
    store: {
      pin: (keys) => pin(keys),
      unpin: (slots) => {
        for (const slot of slots) expect(pinned.delete(slot)).toBe(true);
      },
    },
    clock,
    log: silentLog,
    maxPinnedBlocks,
    peerBlocks: () => 8,
    send: (message) => sent.push(message),
    write: (_slots, _indexes, signal) => {
      signals.push(signal);
      return held.transfer;
    },
  });
  const round = { kv_request_id: "r", keys: KEYS, round_seq: 0 };
  const lookup = () => role.lookup({ type: "lookup", ...round });
  const fetch = (block_indexes = [3, 4]) => role.fetch({ type: "fetch", ...round, block_indexes });
  const abort = () => role.abort({ type: "abort_fetch", ...round });
  /** The store answers a look-up when the returned function is called. */
  const holdPin = () => {
    let resolve: (slots: number[]) => void = () => {};
    pin = () => new Promise((resolved) => (resolve = resolved));
    return (...slots: number[]) => {
      for (const slot of slots) pinned.add(slot);
      resolve(slots);
    };
  };
  const types = () => sent.map(({ type }) => type);
  return { clock, sent, types, pinned, held, signals, role, lookup, fetch, abort, holdPin };
}

it("gives found blocks back when nobody fetches them for 30 s", async () => {
  const { clock, pinned, role, lookup, fetch, types } = server();
  await lookup();
  expect(pinned.size).toBe(2);
  clock.advance(29_999);
  expect(pinned.size).toBe(2);
  clock.advance(1);
  expect(pinned.size).toBe(0);
  expect(role.isIdle).toBe(true);
  expect(clock.pending()).toBe(0);
  void fetch();
  await flush();
  expect(types()).toEqual(["lookup_resp"]);
});

it("answers a look-up that the store does not settle in 5 s with misses", async () => {
  const { clock, sent, lookup, holdPin, role, pinned } = server();
  const found = holdPin();
  void lookup();
  await flush();
  clock.advance(5_000);
  await flush();
  expect(sent).toEqual([expect.objectContaining({ type: "lookup_resp", hits: [false, false] })]);
  // They count until the store has answered.
  expect(role.pinnedBlocks).toBe(2);
  found(1);
  await flush();
  expect(role.pinnedBlocks).toBe(0);
  expect(pinned.size).toBe(0);
});

it("gives back what the store finds after the round has ended", async () => {
  const { abort, lookup, holdPin, pinned, types } = server();
  const found = holdPin();
  void lookup();
  await flush();
  abort();
  found(1, 2);
  await flush();
  expect(pinned.size).toBe(0);
  expect(types()).toEqual(["abort_ack"]);
});

it("acknowledges an abort only when the WRITE has been released, and keeps the blocks until then", async () => {
  const { abort, fetch, lookup, held, pinned, types, signals } = server();
  await lookup();
  void fetch();
  await flush();
  abort();
  expect(signals[0]?.aborted).toBe(true);
  held.fail(new Error("aborted"));
  await flush();
  expect(types()).toEqual(["lookup_resp"]);
  expect(pinned.size).toBe(2);
  held.release();
  await flush();
  expect(types()).toEqual(["lookup_resp", "abort_ack"]);
  expect(pinned.size).toBe(0);
});

it("tells a failed WRITE only when it has been released", async () => {
  const { fetch, held, sent, pinned } = server();
  void fetch();
  await flush();
  held.fail(new Error("the network is down"));
  await flush();
  expect(sent).toEqual([]);
  held.release();
  await flush();
  expect(sent).toEqual([expect.objectContaining({ type: "transfer_done", success: false })]);
  expect(pinned.size).toBe(0);
});

it("closes only when no WRITE reads a block any more", async () => {
  const { fetch, held, role, pinned, sent } = server();
  void fetch();
  await flush();
  const closed = vi.fn();
  void role.close().then(closed);
  held.fail(new Error("aborted"));
  await flush();
  expect(closed).not.toHaveBeenCalled();
  held.release();
  await flush();
  expect(closed).toHaveBeenCalled();
  expect(pinned.size).toBe(0);
  expect(sent).toEqual([]);
});

it("finds no more blocks than a peer may pin", async () => {
  const { lookup, sent } = server(1);
  await lookup();
  expect(sent).toEqual([expect.objectContaining({ hits: [true, false] })]);
});

it.each([
  ["outside the region", [3, 8]],
  ["named twice", [3, 3]],
])("refuses a fetch with a block %s", async (_, indexes) => {
  const { fetch, role } = server();
  await expect(fetch(indexes)).rejects.toMatchObject({ code: "KV_WIRE_MALFORMED" });
  expect(role.isIdle).toBe(true);
});

it("refuses a second fetch of a round, and a look-up after it", async () => {
  const { fetch, lookup } = server();
  void fetch();
  await flush();
  await expect(fetch()).rejects.toMatchObject({ code: "KV_WIRE_MALFORMED" });
  await expect(lookup()).rejects.toMatchObject({ code: "KV_WIRE_MALFORMED" });
});

function client() {
  const clock = manualClock();
  const sent: TierMessage[] = [];
  const left = vi.fn();
  const role = new ClientRole({
    peerId: "127.0.0.1:5710",
    clock,
    send: (message) => sent.push(message),
    leave: left,
  });
  const { signal } = new AbortController();
  return { clock, sent, left, role, signal, types: () => sent.map(({ type }) => type) };
}

it("leaves a peer that answers no look-up for 30 s", async () => {
  const { clock, left, role, signal } = client();
  role.lookup("r", KEYS, signal).catch(() => {});
  await flush();
  clock.advance(29_999);
  expect(left).not.toHaveBeenCalled();
  clock.advance(1);
  expect(left).toHaveBeenCalledWith(expect.objectContaining({ code: "KV_TRANSFER_TIMEOUT" }));
});

it("aborts a fetch after 30 s, and leaves a peer that does not acknowledge it for 10 s", async () => {
  const { clock, left, role, signal, types } = client();
  const { done, released } = role.fetch("r", KEYS, [0, 1], signal);
  const isReleased = vi.fn();
  void released.then(isReleased);
  clock.advance(30_000);
  await expect(done).rejects.toMatchObject({ code: "KV_TRANSFER_TIMEOUT" });
  expect(types()).toEqual(["fetch", "abort_fetch"]);
  clock.advance(10_000);
  expect(left).toHaveBeenCalledOnce();
  role.close(left.mock.calls[0]?.[0]);
  await flush();
  expect(isReleased).not.toHaveBeenCalled();
  clock.advance(60_000);
  await flush();
  expect(isReleased).toHaveBeenCalled();
  expect(clock.pending()).toBe(0);
});

it.each(["abort_ack", "transfer_done"] as const)(
  "releases the blocks of an aborted fetch at %s",
  async (type) => {
    const { clock, role, signal } = client();
    const { done, released } = role.fetch("r", KEYS, [0, 1], signal);
    role.finish("r");
    await expect(done).rejects.toMatchObject({ code: "KV_TRANSFER_ABORTED" });
    if (type === "abort_ack") role.onAbortAck({ type, kv_request_id: "r", round_seq: 0 });
    else role.onTransferDone({ type, kv_request_id: "r", round_seq: 0, success: true });
    await released;
    expect(role.isIdle).toBe(true);
    expect(clock.pending()).toBe(0);
  },
);

it("tells the peer that a request has ended for which it holds blocks", async () => {
  const { role, signal, sent } = client();
  const lookup = role.lookup("r", KEYS, signal);
  role.onLookupResponse({
    type: "lookup_resp",
    kv_request_id: "r",
    keys: KEYS,
    hits: [true, false],
  });
  expect(await lookup).toEqual([true, false]);
  role.finish("r");
  expect(sent.at(-1)).toEqual({
    type: "fetch",
    kv_request_id: "r",
    keys: [],
    block_indexes: [],
    round_seq: 0,
  });
  expect(role.isIdle).toBe(true);
});
