import type { Notification } from "@kv/interface";
import { expect, test } from "vitest";
import { RefCount } from "../ref-count.js";
import { NotificationQueue } from "./notification-queue.js";

const note = (text: string): Notification => ({ from: "a", payload: Buffer.from(text) });

test("each waiting reader counts as a user until it has its notification, or the queue closes", async () => {
  const keepAlive = new RefCount();
  const queue = new NotificationQueue(keepAlive);
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
});

test("one reader at a time; the next reader continues where the last one stopped", async () => {
  const queue = new NotificationQueue(new RefCount());
  queue.push(note("1"));
  queue.push(note("2"));
  const first = queue.read();
  expect(() => queue.read()).toThrow(/another iterator/);
  await first.next();
  await first.return?.();
  await first.return?.();
  expect((await first.next()).done).toBe(true);
  const second = queue.read();
  expect((await second.next()).value).toEqual(note("2"));
});

test("after close nothing is kept, and every read ends at once", async () => {
  const queue = new NotificationQueue(new RefCount());
  queue.push(note("1"));
  queue.close();
  queue.push(note("2"));
  expect((await queue.read().next()).done).toBe(true);
});
