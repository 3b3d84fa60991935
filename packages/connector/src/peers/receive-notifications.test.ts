import { type Agent, silentLog } from "@kv/interface";
import { encodeNotification, type KvNotification } from "@kv/protocol";
import { expect, test } from "vitest";
import type { TransferMetrics } from "../metrics/transfer-metrics.js";
import { receiveNotifications } from "./messages.js";

test("A9: notifications that have come are decoded in turns with other work", async () => {
  const registration = { request_id: "r", local_block_ids: [Array.from({ length: 30_000 }, (_, at) => at)] };
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
  const agent = { notifications } as unknown as Agent;
  receiveNotifications({ agent, log: silentLog, metrics: {} as TransferMetrics }, () => {
    handled.push(turns);
  });
  await expect.poll(() => handled.length).toBe(12);
  expect(new Set(handled).size).toBeGreaterThan(10);
});
