import { once } from "node:events";
import { createServer, type Socket } from "node:net";
import { manualClock } from "@kv/testing/manual-clock";
import { expect, test } from "vitest";
import { GREETING } from "../../test/set-up.js";
import { ZmqSubscription } from "./subscription.js";

const limits = { maxFrames: 8, maxMessageBytes: 2 ** 20, greetingTimeoutMs: 5000 };

const READY_OF_PUB = Buffer.from("04190552454144590b536f636b65742d5479706500000003505542", "hex");

/** A publisher that sends `bytes` to each subscriber. */
async function publisher(bytes: Buffer) {
  const sockets: Socket[] = [];
  const server = createServer((socket) => {
    sockets.push(socket.on("error", () => {}).resume());
    socket.write(bytes);
  }).listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address() as { port: number };
  return {
    sockets,
    endpoint: `tcp://127.0.0.1:${port}`,
    close() {
      for (const socket of sockets) socket.destroy();
      server.close();
    },
  };
}

test("maxMessageBytes: a publisher that announces a larger frame is disconnected when the frame's header arrives", async () => {
  const header = Buffer.alloc(9, 2);
  header.writeBigUInt64BE(BigInt(limits.maxMessageBytes) + 1n, 1);
  const { sockets, endpoint, close } = await publisher(
    Buffer.concat([GREETING, READY_OF_PUB, header]),
  );
  const reasons: string[] = [];
  const subscription = new ZmqSubscription({
    endpoint,
    limits,
    clock: manualClock(),
    message: () => undefined,
    lost: (reason) => void reasons.push(reason),
  });
  await expect.poll(() => sockets[0]?.closed).toBe(true);
  expect(reasons).toHaveLength(1);
  expect(reasons[0]).toContain(String(limits.maxMessageBytes));
  subscription.close();
  close();
});

test("greetingTimeoutMs: a server that does not greet is left, and asked again later", async () => {
  const clock = manualClock();
  const { sockets, endpoint, close } = await publisher(GREETING.subarray(0, 10));
  const subscription = new ZmqSubscription({
    endpoint,
    limits,
    clock,
    message: () => undefined,
    lost: () => {},
  });
  await expect.poll(() => sockets.length).toBe(1);
  clock.advance(limits.greetingTimeoutMs);
  await expect.poll(() => sockets[0]?.closed).toBe(true);
  clock.advance(1000);
  await expect.poll(() => sockets.length).toBe(2);
  subscription.close();
  close();
});

test("A5: a message is read when the promise of the one before has resolved", async () => {
  const message = Buffer.from([0, 1, 7]);
  const { endpoint, close } = await publisher(
    Buffer.concat([GREETING, READY_OF_PUB, message, message, message]),
  );
  const applied: (() => void)[] = [];
  const subscription = new ZmqSubscription({
    endpoint,
    limits,
    clock: manualClock(),
    lost: () => {},
    message: () => new Promise((resolve) => applied.push(resolve)),
  });
  for (const count of [1, 2, 3]) {
    await expect.poll(() => applied.length).toBe(count);
    await new Promise((resolve) => setTimeout(resolve, 30));
    expect(applied).toHaveLength(count);
    applied[count - 1]?.();
  }
  subscription.close();
  close();
});
