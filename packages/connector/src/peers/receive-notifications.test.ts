import { type Agent, silentLog, systemClock } from "@kv/interface";
import { encodeNotification, type KvNotification } from "@kv/protocol";
import { expect, test } from "vitest";
import { receiveNotifications } from "./messages.js";
import type { TransferMetrics } from "./transfers.js";

const contextOf = (notifications: () => AsyncIterable<unknown>) => ({
  agent: { notifications } as unknown as Agent,
  clock: systemClock(),
  log: silentLog,
  metrics: {} as TransferMetrics,
});

test("A9: notifications that have come are decoded in turns with other work", async () => {
  const registration = {
    request_id: "r",
    local_block_ids: [Array.from({ length: 30_000 }, (_, at) => at)],
  };
  const notification: KvNotification = { kind: "push-registration", registration };
  const payload = encodeNotification(notification);
  async function* notifications() {
    for (let at = 0; at < 12; at += 1) yield { from: "d", payload };
  }
  const handled: number[] = [];
  let turns = 0;
  const turn = () => {
    turns += 1;
    if (handled.length < 12) setImmediate(turn);
  };
  setImmediate(turn);
  receiveNotifications(contextOf(notifications), () => {
    handled.push(turns);
  });
  await expect.poll(() => handled.length).toBe(12);
  expect(new Set(handled).size).toBeGreaterThan(10);
});

test("A9: a long notification is decoded in turns with other work, and what came after it is handled after it", async () => {
  const ids = Array.from({ length: 500_000 }, (_, at) => at);
  const registration = { request_id: "r", local_block_ids: [ids] };
  const done: KvNotification = { kind: "done", requestId: "r", readers: 1 };
  async function* notifications() {
    yield { from: "d", payload: encodeNotification({ kind: "push-registration", registration }) };
    yield { from: "d", payload: encodeNotification(done) };
  }
  const handled: KvNotification[] = [];
  let turns = 0;
  const turn = () => {
    turns += 1;
    if (handled.length < 2) setImmediate(turn);
  };
  setImmediate(turn);
  receiveNotifications(contextOf(notifications), (notification) => handled.push(notification));
  await expect.poll(() => handled.length, { timeout: 10_000 }).toBe(2);
  expect(handled).toEqual([{ kind: "push-registration", registration }, done]);
  expect(turns).toBeGreaterThan(20);
});
