import { once } from "node:events";
import { createServer, type Socket } from "node:net";
import { KvError, type LogFields, silentLog } from "@kv/interface";
import { encode } from "@msgpack/msgpack";
import { expect, test } from "vitest";
import { Publisher } from "zeromq";
import { readKvEventBatch } from "./kv-event-batch.js";
import { KvEventSubscriber } from "./kv-event-subscriber.js";

const stored = (hashes: readonly number[], tokens: readonly number[], parent: number | null = null) => ({
  type: "BlockStored",
  block_hashes: hashes,
  parent_block_hash: parent,
  token_ids: tokens,
  block_size: 2,
  lora_id: null,
  medium: "GPU",
  lora_name: null,
});
const batch = (...events: readonly object[]) => encode([1.5, events, 0]);

test("decodes the events of vLLM's publisher, without blocks that have extra keys", () => {
  expect(
    readKvEventBatch(batch(stored([7], [1, 2]), { type: "AllBlocksCleared" }, { type: "Later" })),
  ).toEqual([
    { type: "stored", hashes: ["7"], parent: undefined, tokens: [1, 2], blockSize: 2 },
    { type: "cleared" },
  ]);
  const bytes = { ...stored([], []), block_hashes: [new Uint8Array([1, 2])] };
  expect(readKvEventBatch(batch(bytes))).toMatchObject([{ hashes: ["AQI="] }]);
  expect(readKvEventBatch(batch({ ...stored([7], [1, 2]), lora_name: "l" }))).toEqual([]);
  expect(readKvEventBatch(batch({ ...stored([7], [1, 2]), extra_keys: [["salt"]] }))).toEqual([]);
});

test.each([[encode("text")], [encode([1, [{ type: "BlockStored" }]])], [new Uint8Array([0xc1])]])(
  "refuses malformed batches",
  (payload) => {
    let error: unknown;
    try {
      readKvEventBatch(payload);
    } catch (thrown) {
      error = thrown;
    }
    expect(KvError.is(error, "KV_WIRE_MALFORMED")).toBe(true);
  },
);

test.each([
  ["a list of 2^32 entries", [0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0xdd, 0xff, 0xff, 0xff, 0xff]],
  ["lists of 65,535 entries, nested 300 times", Array.from({ length: 300 }, () => [0xdc, 0xff, 0xff]).flat()],
  ["a map of 2^32 entries", [0x92, 0x01, 0x91, 0xdf, 0xff, 0xff, 0xff, 0xff]],
])("allocates nothing for %s that a few bytes announce", (_, bytes) => {
  expect(() => readKvEventBatch(Uint8Array.from(bytes))).toThrow(
    expect.objectContaining({ code: "KV_WIRE_LIMIT_EXCEEDED" }),
  );
});

test("over ZMQ, events add and remove blocks, a gap clears the index, and malformed batches are skipped", async () => {
  const publisher = new Publisher({ linger: 0 });
  await publisher.bind("tcp://127.0.0.1:*");
  const instance = {
    role: "prefill",
    url: "p",
    inFlight: 0,
    kvEvents: publisher.lastEndpoint ?? "",
  } as const;
  const subscriber = new KvEventSubscriber(silentLog);
  try {
    subscriber.follow([instance]);
    const send = (sequence: bigint, payload: Uint8Array) => {
      const at = Buffer.alloc(8);
      at.writeBigUInt64BE(sequence);
      return publisher.send(["", at, payload]);
    };
    const matched = () => subscriber.matchedTokens(instance, [1, 2, 3, 4]);
    // A subscription takes time to become active. Events that are published before are lost.
    let sequence = 0n;
    await expect
      .poll(async () => {
        await send(sequence++, batch(stored([7, 8], [1, 2, 3, 4])));
        return matched();
      })
      .toBe(4);
    await send(sequence++, new Uint8Array([0xc1]));
    await send(sequence++, batch({ type: "BlockRemoved", block_hashes: [8], medium: "GPU" }));
    await expect.poll(matched).toBe(2);
    await send(sequence + 5n, batch(stored([9], [9, 9])));
    await expect.poll(matched).toBe(0);
    subscriber.follow([]);
    expect(matched()).toBeUndefined();
  } finally {
    subscriber.close();
    publisher.close();
  }
});

test("connects again to a publisher that was restarted", async () => {
  const first = new Publisher({ linger: 0 });
  await first.bind("tcp://127.0.0.1:*");
  const kvEvents = first.lastEndpoint ?? "";
  const instance = { role: "prefill", url: "p", inFlight: 0, kvEvents } as const;
  using subscriber = new KvEventSubscriber(silentLog);
  subscriber.follow([instance]);
  const matches = async (publisher: Publisher, hash: number) => {
    let sequence = 0n;
    await expect
      .poll(async () => {
        const at = Buffer.alloc(8);
        at.writeBigUInt64BE(sequence++);
        await publisher.send(["", at, batch(stored([hash], [hash, hash]))]);
        return subscriber.matchedTokens(instance, [hash, hash]);
      })
      .toBe(2);
  };
  await matches(first, 7);
  first.close();
  const second = new Publisher({ linger: 0 });
  await expect
    .poll(() =>
      second.bind(kvEvents).then(
        () => true,
        () => false,
      ),
    )
    .toBe(true);
  await matches(second, 8);
  second.close();
});

test("maxFrames: a publisher that sends frames without end is disconnected, each time, and logged once", async () => {
  const greeting = Buffer.from(`ff00000000000000017f03014e554c4c${"00".repeat(48)}`, "hex");
  const ready = Buffer.from("04190552454144590b536f636b65742d5479706500000003505542", "hex");
  const sockets: Socket[] = [];
  let sent = 0;
  const server = createServer((socket) => {
    sockets.push(socket.on("error", () => {}).resume());
    socket.write(Buffer.concat([greeting, ready]));
    const pour = () => {
      const frames = Buffer.alloc(64 * 1024, Buffer.from([1, 2, 7, 7]));
      while (!socket.destroyed && sent < 2 ** 29) {
        sent += frames.length;
        if (!socket.write(frames)) return;
      }
    };
    socket.on("drain", pour);
    socket.once("data", pour);
  }).listen(0, "127.0.0.1");
  await once(server, "listening");
  const warnings: (LogFields | undefined)[] = [];
  const log = { ...silentLog, warn: (_: string, fields?: LogFields) => void warnings.push(fields) };
  using subscriber = new KvEventSubscriber(log);
  const { port } = server.address() as { port: number };
  subscriber.follow([{ role: "prefill", url: "p", inFlight: 0, kvEvents: `tcp://127.0.0.1:${port}` }]);
  await expect.poll(() => sockets.length).toBeGreaterThan(2);
  expect(warnings).toHaveLength(1);
  expect(warnings[0]?.["reason"]).toContain("more than 8 frames");
  expect(sent).toBeLessThan(2 ** 27);
  for (const socket of sockets) socket.destroy();
  server.close();
});
