import { once } from "node:events";
import { connect, createServer, type Socket } from "node:net";
import { manualClock } from "@kv/testing/manual-clock";
import { afterEach, expect, test } from "vitest";
import {
  channel,
  closeAll,
  closers,
  failure,
  GREETING,
  host,
  listen,
  talker,
  until,
} from "../test/set-up.js";
import { sideChannelLimits } from "./listener/limits.js";

const READY_OF_REQ = Buffer.from(
  "04260552454144590b536f636b65742d5479706500000003524551084964656e7469747900000000",
  "hex",
);
const READY_OF_ROUTER = Buffer.from(
  "04290552454144590b536f636b65742d5479706500000006524f55544552084964656e7469747900000000",
  "hex",
);
/** The greeting and READY of a ROUTER. */
const GREETED_BYTES = GREETING.length + READY_OF_ROUTER.length;
const request = (text: string) =>
  Buffer.concat([Buffer.from([1, 0, 0, text.length]), Buffer.from(text)]);

afterEach(closeAll);

/** A listener that echoes, and what asks it. */
async function served(options: Parameters<typeof talker>[1] = {}) {
  const { echo, ask, warnings } = talker(undefined, options);
  const { port } = await echo();
  return { port, warnings, ask: async (word: string) => (await ask(port, word))[1] };
}

/** A peer that sends what it likes. */
class RawPeer {
  readonly socket: Socket;
  received = Buffer.alloc(0);
  closed = false;

  constructor(port: number) {
    this.socket = connect(port, host);
    this.socket.on("error", () => {});
    this.socket.on("data", (data) => {
      this.received = Buffer.concat([this.received, data]);
    });
    this.socket.on("close", () => {
      this.closed = true;
    });
    closers.push(() => this.socket.destroy());
  }

  async greeted(): Promise<this> {
    this.socket.write(Buffer.concat([GREETING, READY_OF_REQ]));
    await until(() => this.received.length >= GREETED_BYTES);
    return this;
  }

  async gone(): Promise<void> {
    await until(() => this.closed);
  }
}

test("maxRequestFrames: a message of frames without end ends its connection at the seventeenth, and others are served", async () => {
  const { port, ask, warnings } = await served();
  const peer = await new RawPeer(port).greeted();
  const frame = Buffer.alloc(4009);
  frame.set([3, 0, 0, 0, 0, 0, 0, 0x0f, 0xa0]);
  peer.socket.write(Buffer.concat(Array.from({ length: 100 }, () => frame)));
  await peer.gone();
  const empty = await new RawPeer(port).greeted();
  empty.socket.write(Buffer.alloc(400_000, Buffer.from([1, 0])));
  await empty.gone();
  expect(await ask("still here")).toBe("still here");
  expect(warnings).toMatchObject([
    { event: "side-channel-connection-closed", reason: "KV_WIRE_LIMIT_EXCEEDED" },
  ]);
});

test("maxRequestBytes: a larger request ends its connection when the header of its frame arrives", async () => {
  const { port, ask } = await served({ maxRequestBytes: 1000 });
  const peer = await new RawPeer(port).greeted();
  peer.socket.write(Buffer.from([1, 0, 2, 0, 0, 0, 0, 0, 0, 3, 0xe9]));
  await peer.gone();
  expect(await ask("x".repeat(1000))).toHaveLength(1000);
  expect((await failure(ask("x".repeat(1001)))).message).toContain("closed the connection");
});

test("greetingTimeoutMs, messageTimeoutMs, idleTimeoutMs: a slow greeting, a slow request and an idle connection end; a heartbeat is not a request", async () => {
  const clock = manualClock();
  const { port, warnings } = await served({
    clock,
    greetingTimeoutMs: 1000,
    messageTimeoutMs: 2000,
    idleTimeoutMs: 4000,
  });
  const pass = async (ms: number) => {
    clock.advance(ms);
    await new Promise((resolve) => setTimeout(resolve, 20));
  };
  const silent = new RawPeer(port);
  const slow = new RawPeer(port);
  slow.socket.write(GREETING);
  const begun = await new RawPeer(port).greeted();
  begun.socket.write(Buffer.from([1, 0, 0, 5]));
  const idle = await new RawPeer(port).greeted();
  idle.socket.write(request("hello"));
  await until(() => idle.received.length > GREETED_BYTES && slow.received.length >= GREETED_BYTES);
  await pass(900);
  expect([silent.closed, slow.closed, begun.closed, idle.closed]).toEqual([
    false,
    false,
    false,
    false,
  ]);
  begun.socket.write("h");
  await pass(300);
  await Promise.all([silent.gone(), slow.gone()]);
  expect([begun.closed, idle.closed]).toEqual([false, false]);
  begun.socket.write("e");
  await pass(1000);
  await begun.gone();
  const before = idle.received.length;
  idle.socket.write(Buffer.from("0407 0450494e47 0064".replaceAll(" ", ""), "hex"));
  await until(() => idle.received.length > before);
  expect(idle.closed).toBe(false);
  await pass(2000);
  await idle.gone();
  clock.advance(10_000);
  expect(warnings).toMatchObject(
    [0, 2].map((suppressed) => {
      return { event: "side-channel-connection-closed", reason: "slow", suppressed };
    }),
  );
});

test("maxConnections: the one that has been idle for longest makes room, and a request in progress stays", async () => {
  const clock = manualClock();
  let answer: (frames: readonly Uint8Array[]) => void = () => {};
  const side = channel({ clock, maxConnections: 10, maxConnectionsPerAddress: 5 });
  const { port } = await listen(
    side,
    () =>
      new Promise((resolve) => {
        answer = resolve;
      }),
  );
  const asking = await new RawPeer(port).greeted();
  asking.socket.write(request("slow"));
  const idle: RawPeer[] = [];
  for (let at = 0; at < 20; at += 1) {
    clock.advance(1);
    idle.push(await new RawPeer(port).greeted());
  }
  await until(() => idle.filter(({ closed }) => closed).length === 16);
  expect(idle.map(({ closed }) => closed)).toEqual(idle.map((_, at) => at < 16));
  expect(asking.closed).toBe(false);
  answer([Buffer.from("done")]);
  await until(() => asking.received.length > GREETED_BYTES);
  expect(asking.received.subarray(-4).toString()).toBe("done");
});

test("maxConnectionsPerAddress: many connections that never greet make room for a request of the same address", async () => {
  const { port, ask } = await served({ maxConnections: 8 });
  const peers = Array.from({ length: 100 }, () => new RawPeer(port));
  await until(() => peers.filter(({ closed }) => closed).length === 96);
  expect(await ask("served")).toBe("served");
});

test("a peer that does not read its replies is not read, and ends after a time", async () => {
  const clock = manualClock();
  const side = channel({ clock });
  let asked = 0;
  const { port } = await listen(side, () => {
    asked += 1;
    return [Buffer.alloc(16 * 2 ** 20)];
  });
  const peer = await new RawPeer(port).greeted();
  peer.socket.pause();
  for (let at = 0; at < 100; at += 1) peer.socket.write(request("more"));
  await until(() => asked > 0);
  await new Promise((resolve) => setTimeout(resolve, 100));
  expect(asked).toBe(1);
  clock.advance(5250);
  peer.socket.resume();
  await peer.gone();
});

test("maxQueuedBytes: above it, the connection that has waited for longest ends", async () => {
  const side = channel({ maxQueuedBytes: 20 * 2 ** 20 });
  const { port } = await listen(side, () => [Buffer.alloc(16 * 2 ** 20)]);
  const first = await new RawPeer(port).greeted();
  first.socket.pause();
  first.socket.write(request("one"));
  await new Promise((resolve) => setTimeout(resolve, 50));
  const second = await new RawPeer(port).greeted();
  second.socket.pause();
  second.socket.write(request("two"));
  await new Promise((resolve) => setTimeout(resolve, 50));
  first.socket.resume();
  await first.gone();
  second.socket.resume();
  await until(() => second.received.length > 16 * 2 ** 20);
  expect(second.closed).toBe(false);
});

test("a flood of requests on one connection leaves turns for others", async () => {
  const { echo, ask, asked } = talker();
  const { port } = await echo();
  const flood = await new RawPeer(port).greeted();
  flood.socket.write(Buffer.concat(Array.from({ length: 100_000 }, () => request("x"))));
  await until(() => asked.length > 0);
  const before = asked.length;
  await new Promise((resolve) => setImmediate(resolve));
  await new Promise((resolve) => setImmediate(resolve));
  expect(asked.length - before).toBeLessThan(1000);
  expect(await ask(port, "honest")).toEqual(["echo", "honest"]);
  expect(asked.length).toBeLessThan(90_000);
});

/** A listener that sends `bytes` after the handshake, again and again. */
async function hostile(bytes: Buffer): Promise<{ port: number; sent: () => number }> {
  let sent = 0;
  const sockets = new Set<Socket>();
  const server = createServer((socket) => {
    sockets.add(socket);
    socket.on("error", () => {}).resume();
    socket.write(Buffer.concat([GREETING, READY_OF_ROUTER]));
    const pour = () => {
      while (!socket.destroyed && sent < 512 * 2 ** 20) {
        sent += bytes.length;
        if (!socket.write(bytes)) return;
      }
    };
    socket.on("drain", pour);
    socket.once("data", pour);
  }).listen(0, host);
  await once(server, "listening");
  closers.push(() => {
    for (const socket of sockets) socket.destroy();
    server.close();
  });
  return { port: (server.address() as { port: number }).port, sent: () => sent };
}

test.each([
  [
    "frames with MORE without end",
    Buffer.concat(Array.from({ length: 16 }, () => Buffer.from("0104aabbccdd", "hex"))),
    "16 frames",
  ],
  ["empty frames without end", Buffer.alloc(64 * 1024, Buffer.from([1, 0])), "16 frames"],
  [
    "a frame of 2 GiB",
    Buffer.concat([Buffer.from("01000200000000800000", "hex"), Buffer.alloc(60_000)]),
    "larger than 100000 bytes",
  ],
  [
    "heartbeats without end",
    Buffer.alloc(9 * 7000, Buffer.from("0407 0450494e47 0064".replaceAll(" ", ""), "hex")),
    "commands in a row",
  ],
  ["a reply that was not asked for", Buffer.from("010000010100000101000001", "hex"), "not a reply"],
])(
  "a hostile listener that sends %s ends the request",
  { timeout: 20_000 },
  async (_, bytes, why) => {
    const { port, sent } = await hostile(bytes);
    const error = await failure(talker(undefined, { maxReplyBytes: 100_000 }).ask(port, "hello"));
    expect(error.code).toBe("KV_SIDE_CHANNEL_UNREACHABLE");
    expect(error.message).toContain(why);
    expect(sent()).toBeLessThan(64 * 2 ** 20);
  },
);

test("the default connections leave descriptors, and half of them go to one address", () => {
  const { maxConnections, maxConnectionsPerAddress } = sideChannelLimits({});
  expect(maxConnections).toBeGreaterThan(0);
  expect(maxConnections).toBeLessThanOrEqual(1024);
  expect(maxConnectionsPerAddress).toBe(Math.ceil(maxConnections / 2));
});
