import type { Notification } from "@kv/interface";
import { expect, test } from "vitest";
import { type NativeEvent, NOTIFICATION } from "../addon/native.js";
import { RefCount } from "../ref-count.js";
import { NotificationQueue } from "./notification-queue.js";

const BATCH = 1024;

const note = (text: string, from = "a"): Notification => ({ from, payload: Buffer.from(text) });

/** A queue over an addon that hands out a batch at a time. */
function queueOf(keepAlive = new RefCount()) {
  const waiting: NativeEvent[] = [];
  let largest = 0;
  const takeNotifications = (): [NativeEvent[], boolean] => {
    const taken = waiting.splice(0, BATCH);
    largest = Math.max(largest, taken.length);
    return [taken, waiting.length > 0];
  };
  const queue = new NotificationQueue({ takeNotifications }, keepAlive);
  const arrive = (...notes: readonly Notification[]) => {
    const isFirst = waiting.length === 0;
    for (const { from, payload } of notes)
      waiting.push([NOTIFICATION, 0, undefined, payload, from]);
    if (isFirst) queue.onArrival();
  };
  return { queue, arrive, waiting, largest: () => largest };
}

test("each waiting reader counts as a user until it has its notification, or the queue closes, which keeps nothing", async () => {
  const keepAlive = new RefCount();
  const { queue, arrive } = queueOf(keepAlive);
  const reader = queue.read();
  arrive(note("1"));
  expect((await reader.next()).value).toEqual(note("1"));
  expect(keepAlive.count).toBe(0);
  const [second, third] = [reader.next(), reader.next()];
  expect(keepAlive.count).toBe(2);
  arrive(note("2"));
  expect((await second).value).toEqual(note("2"));
  expect(keepAlive.count).toBe(1);
  queue.close();
  expect(await third).toEqual({ done: true, value: undefined });
  expect(keepAlive.count).toBe(0);
  arrive(note("3"));
  expect((await reader.next()).done).toBe(true);
});

test("without a reader everything waits in the addon, and a second iterator continues after the first", async () => {
  const { queue, arrive, waiting } = queueOf();
  arrive(note("1"), note("2"), note("3"));
  expect(waiting.length).toBe(3);
  for await (const { payload } of queue.read()) {
    expect(payload).toEqual(Buffer.from("1"));
    break;
  }
  const reader = queue.read();
  expect(() => queue.read()).toThrow(expect.objectContaining({ code: "KV_NOTIFICATION_INVALID" }));
  expect((await reader.next()).value).toEqual(note("2"));
  expect((await reader.next()).value).toEqual(note("3"));
});

test("300,000 notifications are read in order, a batch in a turn of the event loop", async () => {
  const { queue, arrive, largest } = queueOf();
  const reader = queue.read();
  let read = 0;
  for (let round = 0; round < 20; round++) {
    for (let at = 0; at < 15_000; at++) arrive(note(`${round * 15_000 + at}`));
    for (; read < (round + 1) * 15_000 - 7; read++) {
      const text = Buffer.from((await reader.next()).value?.payload).toString();
      // 300,000 expectations take longer than all else.
      if (text !== `${read}`) expect(text).toBe(`${read}`);
    }
  }
  expect(read).toBe(20 * 15_000 - 7);
  expect(largest()).toBe(BATCH);
});
