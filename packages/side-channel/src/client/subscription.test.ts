import { once } from "node:events";
import { createServer, type Socket } from "node:net";
import { manualClock } from "@kv/testing/manual-clock";
import { afterEach, expect, test } from "vitest";
import { closeAll, closers, GREETING, host, leavesNoSocket } from "../../test/set-up.js";
import { ZmqSubscription, type ZmqSubscriptionOptions } from "./subscription.js";

afterEach(closeAll);
const limits = { maxFrames: 8, maxMessageBytes: 2 ** 20, greetingTimeoutMs: 5000 };

const READY_OF_PUB = Buffer.from("04190552454144590b536f636b65742d5479706500000003505542", "hex");

/** A subscription to a publisher that sends these bytes to each subscriber. */
async function subscribed(
  bytes: readonly Uint8Array[],
  message: ZmqSubscriptionOptions["message"] = () => undefined,
) {
  const clock = manualClock();
  leavesNoSocket(clock.pending);
  const sockets: Socket[] = [];
  const server = createServer((socket) => {
    sockets.push(socket.on("error", () => {}).resume());
    socket.write(Buffer.concat(bytes));
  }).listen(0, host);
  await once(server, "listening");
  const { port } = server.address() as { port: number };
  const reasons: string[] = [];
  const subscription = new ZmqSubscription({
    endpoint: `tcp://${host}:${port}`,
    limits,
    clock,
    message,
    lost: (reason) => void reasons.push(reason),
  });
  closers.push(() => {
    subscription.close();
    for (const socket of sockets) socket.destroy();
    server.close();
  });
  return { clock, sockets, reasons };
}

test("maxMessageBytes: a publisher that announces a larger frame is disconnected when the frame's header arrives", async () => {
  const header = Buffer.alloc(9, 2);
  header.writeBigUInt64BE(BigInt(limits.maxMessageBytes) + 1n, 1);
  const { sockets, reasons } = await subscribed([GREETING, READY_OF_PUB, header]);
  await expect.poll(() => sockets[0]?.closed).toBe(true);
  expect(reasons).toHaveLength(1);
  expect(reasons[0]).toContain(String(limits.maxMessageBytes));
});

test("greetingTimeoutMs: a server that does not greet is left, and asked again later", async () => {
  const { clock, sockets } = await subscribed([GREETING.subarray(0, 10)]);
  await expect.poll(() => sockets.length).toBe(1);
  clock.advance(limits.greetingTimeoutMs);
  await expect.poll(() => sockets[0]?.closed).toBe(true);
  clock.advance(1000);
  await expect.poll(() => sockets.length).toBe(2);
});

test("A5: a message is read when the promise of the one before has resolved", async () => {
  const message = Buffer.from([0, 1, 7]);
  const applied: (() => void)[] = [];
  await subscribed(
    [GREETING, READY_OF_PUB, message, message, message],
    () => new Promise((resolve) => applied.push(resolve)),
  );
  for (const count of [1, 2, 3]) {
    await expect.poll(() => applied.length).toBe(count);
    await new Promise((resolve) => setTimeout(resolve, 30));
    expect(applied).toHaveLength(count);
    applied[count - 1]?.();
  }
});
