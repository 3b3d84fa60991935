import type { Notification } from "@kv/interface";
import { expect, test } from "vitest";
import { inbox } from "./notification-queue.js";

const note = (text: string): Notification => ({ from: "a", payload: Buffer.from(text) });

test("a waiting reader is held for, and let go when it has its due", async () => {
  let held = 0;
  const box = inbox(() => {
    held++;
    return () => held--;
  });
  const reader = box.read();
  box.push(note("1"));
  expect((await reader.next()).value).toEqual(note("1"));
  expect(held).toBe(0);
  const [second, third] = [reader.next(), reader.next()];
  expect(held).toBe(2);
  box.push(note("2"));
  expect((await second).value).toEqual(note("2"));
  expect(held).toBe(1);
  box.close();
  expect(await third).toEqual({ done: true, value: undefined });
  expect(held).toBe(0);
});

test("one reader at a time; the next one goes on where it stopped", async () => {
  const box = inbox(() => () => {});
  box.push(note("1"));
  box.push(note("2"));
  const first = box.read();
  expect(() => box.read()).toThrow(/another iterator/);
  await first.next();
  await first.return?.();
  await first.return?.();
  expect((await first.next()).done).toBe(true);
  const second = box.read();
  expect((await second.next()).value).toEqual(note("2"));
});

test("after close nothing is kept, and every read is at its end", async () => {
  const box = inbox(() => () => {});
  box.push(note("1"));
  box.close();
  box.push(note("2"));
  expect((await box.read().next()).done).toBe(true);
});
