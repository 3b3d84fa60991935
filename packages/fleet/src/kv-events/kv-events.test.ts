import { once } from "node:events";
import { createServer, type Socket } from "node:net";
import { type LogFields, silentLog, systemClock } from "@kv/interface";
import { encodeMsgpack as encode } from "@kv/protocol";
import { expect, test } from "vitest";
import { type KvEvent, readKvEventBatch } from "./kv-event-batch.js";
import { KvEventSubscriber } from "./kv-event-subscriber.js";

const stored = (
  hashes: readonly number[],
  tokens: readonly number[],
  parent: number | null = null,
) => ({
  type: "BlockStored",
  block_hashes: hashes,
  parent_block_hash: parent,
  token_ids: tokens,
  block_size: 2,
  lora_id: null,
  medium: "GPU",
  lora_name: null,
});
/** Reads all events. */
const read = (payload: Uint8Array) =>
  [...readKvEventBatch(payload)].filter((event): event is KvEvent => event !== undefined);
const batch = (...events: readonly object[]) => encode([1.5, events, 0]);

test("decodes the events of vLLM's publisher, without blocks that have extra keys", () => {
  expect(read(batch(stored([7], [1, 2]), { type: "AllBlocksCleared" }, { type: "Later" }))).toEqual(
    [
      {
        type: "stored",
        hashes: ["7"],
        parent: undefined,
        tokens: [1, 2],
        blockSize: 2,
        lookahead: undefined,
        group: { index: 0, needs: "all" },
      },
      { type: "cleared" },
    ],
  );
  const bytes = { ...stored([], [1, 2]), block_hashes: [new Uint8Array([1, 2])] };
  expect(read(batch(bytes))).toMatchObject([{ hashes: ["AQI="] }]);
  const largest = Buffer.from(batch(stored([2 ** 52], [1, 2])));
  largest.fill(0xff, largest.indexOf(0xcf) + 1, largest.indexOf(0xcf) + 9);
  expect(read(largest)).toMatchObject([{ hashes: ["18446744073709551615"] }]);
  expect(read(batch({ ...stored([7], [1, 2]), lora_name: "l" }))).toEqual([]);
  expect(read(batch({ ...stored([7], [1, 2]), extra_keys: [["salt"]] }))).toEqual([]);
});

test("the group of a block says what it needs, and blocks of other media are left out", () => {
  const group = (more: object) => read(batch({ ...stored([7], [1, 2]), ...more }))[0];
  expect(group({ group_idx: 3 })).toMatchObject({ group: { index: 3, needs: "all" } });
  const window = { kv_cache_spec_kind: "sliding_window", kv_cache_spec_sliding_window: 64 };
  expect(group(window)).toMatchObject({ group: { needs: 63 } });
  expect(group({ kv_cache_spec_kind: "mamba" })).toMatchObject({ group: { needs: 1 } });
  expect(group({ medium: "CPU" })).toBeUndefined();
  const removed = { type: "BlockRemoved", block_hashes: [7], group_idx: 3 };
  expect(read(batch({ ...removed, medium: "GPU" }))).toEqual([
    { type: "removed", hashes: ["7"], group: 3 },
  ]);
  expect(read(batch({ ...removed, medium: "CPU" }))).toEqual([]);
});

test.each([
  [encode("text")],
  [encode([1, [{ type: "BlockStored" }]])],
  [batch(stored([1, 2], [1, 2]))],
  [new Uint8Array([0xc1])],
])("refuses malformed batches", (payload) => {
  expect(() => read(payload)).toThrow(expect.objectContaining({ code: "KV_WIRE_MALFORMED" }));
});

test.each([
  ["a list of 2^32 entries", [0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0xdd, 0xff, 0xff, 0xff, 0xff]],
  [
    "lists of 65,535 entries, nested 300 times",
    Array.from({ length: 300 }, () => [0xdc, 0xff, 0xff]).flat(),
  ],
  ["a map of 2^32 entries", [0x92, 0x01, 0x91, 0xdf, 0xff, 0xff, 0xff, 0xff]],
])("allocates nothing for %s that a few bytes announce", (_, bytes) => {
  expect(() => read(Uint8Array.from(bytes))).toThrow(
    expect.objectContaining({ code: "KV_WIRE_LIMIT_EXCEEDED" }),
  );
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
  using subscriber = new KvEventSubscriber({ log, clock: systemClock() });
  const { port } = server.address() as { port: number };
  subscriber.follow([
    { role: "prefill", url: "p", inFlight: 0, kvEvents: `tcp://127.0.0.1:${port}` },
  ]);
  await expect.poll(() => sockets.length).toBeGreaterThan(2);
  expect(warnings).toHaveLength(1);
  expect(warnings[0]?.["reason"]).toContain("more than 8 frames");
  expect(sent).toBeLessThan(2 ** 27);
  for (const socket of sockets) socket.destroy();
  server.close();
});
