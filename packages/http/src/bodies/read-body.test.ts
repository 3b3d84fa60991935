import type { IncomingMessage } from "node:http";
import { PassThrough } from "node:stream";
import { setImmediate as nextTurn } from "node:timers/promises";
import { YieldingQueue } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { expect, onTestFinished, test, vi } from "vitest";
import { BodyBudget, ByteCollector, IncomingBody, readJsonBody } from "./read-body.js";

const LIMITS = { bodyLengthBytes: 2 ** 20, bodyDepth: 10, bodyMembers: 10, bodyValues: 10 };

test("the rest of a body that is refused while it waits for its turn stays unread", async () => {
  const queue = new YieldingQueue({ clock: manualClock() });
  const budget = new BodyBudget({
    bodiesLengthBytes: 150_000,
    bodiesPerClientLengthBytes: 150_000,
  });
  const request = Object.assign(new PassThrough(), {
    headers: { "content-type": "application/json" },
  });
  const body = readJsonBody(request as unknown as IncomingMessage, {
    limits: LIMITS,
    budget,
    queues: { reads: queue, parses: queue },
    client: "one",
  });
  const refused = expect(body).rejects.toMatchObject({ code: "KV_PROXY_OVERLOADED" });
  request.once("data", () => {
    // The second body needs the memory of the first one, which is larger and waits for its turn.
    budget.open("another", () => {}).add(90_000);
    // As the server does after this refusal.
    request.pause();
  });
  request.write(Buffer.alloc(100_000, " "));
  await refused;
  request.write(Buffer.alloc(1000, " "));
  for (let turn = 0; turn < 3; turn += 1) await nextTurn();
  expect(request.isPaused()).toBe(true);
  expect(request.readableLength).toBe(1000);
});

test("a body above several limits has the error of the first one, wherever it is cut", () => {
  const limits = { ...LIMITS, bodyLengthBytes: 20, bodyDepth: 3 };
  const budget = new BodyBudget({ bodiesLengthBytes: 1e6, bodiesPerClientLengthBytes: 1e6 });
  for (const [text, limit] of [
    [`{"p":"${"a".repeat(20)}","x":[[[[]]]]}`, "limits.bodyLengthBytes"],
    [`{"x":[[[[]]]],"p":"${"a".repeat(20)}"}`, "limits.bodyDepth"],
  ] as const) {
    const bytes = Buffer.from(text);
    for (let at = 0; at <= bytes.length; at += 1) {
      const body = new IncomingBody({ limits, budget, client: "one" }, undefined, () => {});
      const push = () => {
        body.push(bytes.subarray(0, at));
        body.push(bytes.subarray(at));
      };
      expect(push, `cut at ${at}`).toThrow(
        expect.objectContaining({ details: expect.objectContaining({ limit }) }),
      );
    }
  }
});

test("collects chunks of any length, and keeps none of them", () => {
  const collector = new ByteCollector();
  const chunk = Buffer.from("a");
  collector.push(chunk);
  expect(collector.take().buffer).toBe(chunk.buffer);
  expect(collector.take()).toHaveLength(0);
  const chunks = [
    "",
    "a",
    "bc",
    "d".repeat(200_000),
    ...Array.from({ length: 3000 }, (_, at) => String(at)),
  ];
  for (const text of chunks) {
    const bytes = Buffer.from(text);
    collector.push(bytes);
    if (text.length > 1) bytes.fill("x");
  }
  expect(collector.take().toString()).toBe(chunks.join(""));
});

test("copies little where the length is known, and takes at most four times the memory of what has come", () => {
  const [chunk, count] = [Buffer.alloc(64 * 1024, "x"), 64];
  const collector = new ByteCollector(count * chunk.length);
  const allocated = vi.spyOn(Buffer, "allocUnsafeSlow");
  onTestFinished(() => allocated.mockRestore());
  for (let at = 1; at <= count; at += 1) {
    collector.push(chunk);
    const size = allocated.mock.lastCall?.[0] ?? 0;
    expect(size).toBeLessThanOrEqual(4 * at * chunk.length);
  }
  const copies = allocated.mock.calls.length;
  expect([copies, collector.take().buffer.byteLength]).toEqual([3, count * chunk.length]);
});
