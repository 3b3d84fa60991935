import type { Notification } from "@kv/interface";
import { expect, test } from "vitest";
import { RefCount } from "../ref-count.js";
import { MAX_WAITING, MAX_WAITING_BYTES, NotificationQueue } from "./notification-queue.js";

const note = (text: string, from = "a"): Notification => ({ from, payload: Buffer.from(text) });

function queueOf(keepAlive = new RefCount()) {
  const dropped: string[] = [];
  return {
    queue: new NotificationQueue({ keepAlive, onDrop: (from) => dropped.push(from) }),
    dropped,
  };
}

test("each waiting reader counts as a user until it has its notification, or the queue closes, which keeps nothing", async () => {
  const keepAlive = new RefCount();
  const { queue } = queueOf(keepAlive);
  const reader = queue.read();
  queue.push(note("1"));
  expect((await reader.next()).value).toEqual(note("1"));
  expect(keepAlive.count).toBe(0);
  const [second, third] = [reader.next(), reader.next()];
  expect(keepAlive.count).toBe(2);
  queue.push(note("2"));
  expect((await second).value).toEqual(note("2"));
  expect(keepAlive.count).toBe(1);
  queue.close();
  expect(await third).toEqual({ done: true, value: undefined });
  expect(keepAlive.count).toBe(0);
  queue.push(note("3"));
  expect((await reader.next()).done).toBe(true);
});

test("a sender has a quarter of the queue, and what exceeds it is dropped and reported", async () => {
  const { queue, dropped } = queueOf();
  for (let at = 0; at < MAX_WAITING / 4 + 3; at++) queue.push(note(`${at}`, "loud"));
  expect(dropped).toEqual(["loud", "loud", "loud"]);
  queue.push(note("1", "quiet"));
  expect(dropped.length).toBe(3);
  const reader = queue.read();
  for (let at = 0; at < MAX_WAITING / 4; at++) {
    expect((await reader.next()).value).toEqual(note(`${at}`, "loud"));
  }
  expect((await reader.next()).value).toEqual(note("1", "quiet"));
  queue.push(note("again", "loud"));
  expect((await reader.next()).value).toEqual(note("again", "loud"));
});

test("all senders together have a limit, in notifications and in bytes", () => {
  const { queue, dropped } = queueOf();
  for (let at = 0; at < MAX_WAITING + 2; at++) queue.push(note("", `sender ${at}`));
  expect(dropped).toEqual([`sender ${MAX_WAITING}`, `sender ${MAX_WAITING + 1}`]);
  const long = queueOf();
  const payload = new Uint8Array(MAX_WAITING_BYTES / 8);
  for (let at = 0; at < 3; at++) long.queue.push({ from: "a", payload });
  expect(long.dropped).toEqual(["a"]);
});

test("300,000 notifications are read in order, and each takes as long as with few", async () => {
  const { queue } = queueOf();
  const reader = queue.read();
  let read = 0;
  for (let round = 0; round < 20; round++) {
    for (let at = 0; at < 15_000; at++) queue.push(note(`${round * 15_000 + at}`));
    for (; read < (round + 1) * 15_000 - 7; read++) {
      const text = Buffer.from((await reader.next()).value?.payload).toString();
      // 300,000 expectations take longer than all else.
      if (text !== `${read}`) expect(text).toBe(`${read}`);
    }
  }
  expect(read).toBe(20 * 15_000 - 7);
});
