import type { IncomingMessage } from "node:http";
import { PassThrough } from "node:stream";
import { setImmediate as nextTurn } from "node:timers/promises";
import { YieldingQueue } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { expect, test } from "vitest";
import { BodyBudget, readJsonBody } from "./read-body.js";

const LIMITS = { bodyLengthBytes: 2 ** 20, bodyDepth: 10, bodyMembers: 10, bodyValues: 10 };

test("the rest of a body that is refused while it waits for its turn stays unread", async () => {
  const queue = new YieldingQueue({ clock: manualClock() });
  const budget = new BodyBudget({ allBytes: 150_000, perClientBytes: 150_000 });
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
