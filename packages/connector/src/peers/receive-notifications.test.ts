import { type Agent, silentLog, systemClock } from "@kv/interface";
import { encodeNotification, type KvNotification } from "@kv/protocol";
import { expect, test } from "vitest";
import { receiveNotifications } from "./messages.js";
import type { TransferMetrics } from "./transfers.js";

/** What is handled of some payloads, and how many turns of other work came before each. */
async function received(payloads: readonly Uint8Array[]) {
  async function* notifications() {
    for (const payload of payloads) yield { from: "d", payload };
  }
  const context = {
    agent: { notifications } as unknown as Agent,
    clock: systemClock(),
    log: silentLog,
    metrics: {} as TransferMetrics,
  };
  const handled: KvNotification[] = [];
  const before: number[] = [];
  let turns = 0;
  const turn = () => {
    turns += 1;
    if (handled.length < payloads.length) setImmediate(turn);
  };
  setImmediate(turn);
  receiveNotifications(context, (notification) => {
    before.push(turns);
    handled.push(notification);
  });
  await expect.poll(() => handled.length, { timeout: 10_000 }).toBe(payloads.length);
  return { handled, before };
}

const registrationOf = (blocks: number): KvNotification => ({
  kind: "push-registration",
  registration: {
    request_id: "r",
    local_block_ids: [Array.from({ length: blocks }, (_, at) => at)],
  },
});

test("A9: notifications that have come are decoded in turns with other work", async () => {
  const payload = encodeNotification(registrationOf(30_000));
  const { before } = await received(new Array(12).fill(payload));
  expect(new Set(before).size).toBeGreaterThan(10);
});

test("A9: a long notification is decoded in turns with other work, and what came after it is handled after it", async () => {
  const done: KvNotification = { kind: "done", requestId: "r", readers: 1 };
  const sent = [registrationOf(500_000), done];
  const { handled, before } = await received(sent.map(encodeNotification));
  expect(handled).toEqual(sent);
  expect(before.at(-1)).toBeGreaterThan(20);
});
