import { KvError } from "@kv/interface";
import { expect, test } from "vitest";
import { virtualClock } from "../index.js";

test("timers fire by time, then in the order in which they were set", async () => {
  const clock = virtualClock({ startMs: 100 });
  const fired: string[] = [];
  clock.setTimer(() => fired.push(`late at ${clock.now()}`), 20);
  clock.setTimer(() => fired.push(`first at ${clock.now()}`), 10);
  clock.setTimer(() => fired.push(`second at ${clock.now()}`), 10);
  clock.setTimer(() => fired.push("cancelled"), 10).cancel();
  await clock.advance(15);
  expect(fired).toEqual(["first at 110", "second at 110"]);
  expect(clock.now()).toBe(115);
  expect(clock.pendingTimers).toBe(1);
  await clock.advance(5);
  expect(fired).toEqual(["first at 110", "second at 110", "late at 120"]);
  expect(clock.pendingTimers).toBe(0);
});

test("long chains of promises finish before the next timer fires", async () => {
  const clock = virtualClock();
  const order: string[] = [];
  const long = async (): Promise<void> => {
    for (let step = 0; step < 5000; step++) await Promise.resolve();
    order.push("promises of the first");
    clock.setTimer(() => order.push("set by the first"), 0);
  };
  clock.setTimer(() => void long(), 5);
  clock.setTimer(() => order.push("second"), 5);
  await clock.runUntilIdle();
  expect(order).toEqual(["promises of the first", "second", "set by the first"]);
  expect(clock.now()).toBe(5);
});

test("thousands of timers in random order fire in order, and cancelled timers never fire", async () => {
  const clock = virtualClock();
  const fired: number[] = [];
  const timers = Array.from({ length: 5000 }, (_, index) => {
    const atMs = (index * 7919) % 1009;
    return { atMs, index, timer: clock.setTimer(() => fired.push(atMs * 10_000 + index), atMs) };
  });
  for (const { index, timer } of timers) if (index % 3 !== 0) timer.cancel();
  const expected = timers
    .filter(({ index }) => index % 3 === 0)
    .map(({ atMs, index }) => atMs * 10_000 + index)
    .sort((a, b) => a - b);
  expect(clock.pendingTimers).toBe(expected.length);
  await clock.runUntilIdle();
  expect(fired).toEqual(expected);
});

test("runUntil and settle stop as soon as the condition holds, and fail when no timer can make it true", async () => {
  const clock = virtualClock();
  let ticks = 0;
  const tick = (): void => {
    ticks += 1;
    clock.setTimer(tick, 10);
  };
  tick();
  await clock.runUntil(() => ticks === 4, { limitMs: 1000 });
  expect(clock.now()).toBe(30);
  await expect(clock.runUntil(() => false, { limitMs: 100 })).rejects.toThrow(
    "the condition is false after 100 ms",
  );
  await expect(clock.runUntilIdle({ limitMs: 50 })).rejects.toSatisfy((e) =>
    KvError.is(e, "KV_INTERNAL"),
  );

  const still = virtualClock();
  await expect(still.settle(new Promise(() => {}))).rejects.toThrow("no timer is left");
  const later = new Promise<number>((resolve) => still.setTimer(() => resolve(7), 1234));
  expect(await still.settle(later)).toBe(7);
  expect(still.now()).toBe(1234);
  await expect(still.settle(Promise.reject(new Error("own")))).rejects.toThrow("own");
});

test("it rejects delays that Node cannot keep and concurrent runs, and passes on errors of timers", async () => {
  const clock = virtualClock();
  expect(() => clock.setTimer(() => {}, Number.POSITIVE_INFINITY)).toThrow(
    "invalid timer of Infinity ms",
  );
  expect(() => clock.setTimer(() => {}, Number.NaN)).toThrow(KvError);
  clock.setTimer(() => {}, 5);
  const first = clock.advance(10);
  await expect(clock.advance(1)).rejects.toThrow("another method of the virtual clock is running");
  await first;
  const failing = virtualClock();
  failing.setTimer(() => {
    throw new Error("in a timer");
  }, 1);
  await expect(failing.advance(1)).rejects.toThrow("in a timer");
});
