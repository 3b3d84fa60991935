import { spawn, spawnSync } from "node:child_process";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import { zmqSideChannel } from "@kv/side-channel";
import { afterEach, describe, expect, test } from "vitest";
import { Dealer, Reply, Request, Router } from "zeromq";

// Our side channel with libzmq on the other end: through the zeromq package, and through pyzmq,
// which vLLM uses.

const host = "127.0.0.1";
const closers: (() => unknown)[] = [];
afterEach(async () => {
  for (const close of closers.splice(0).reverse()) await close();
});
const channel = () => {
  const made = zmqSideChannel();
  closers.push(() => made.close());
  return made;
};
const text = (frames: readonly Uint8Array[]) =>
  frames.map((frame) => Buffer.from(frame).toString());
const own = <T extends { close(): void }>(socket: T): T => {
  closers.push(() => socket.close());
  return socket;
};
const portOf = (endpoint: string | null) => Number(endpoint?.split(":").at(-1));

/** Frames on both sides of each limit of the encoding. */
const SIZES = [0, 1, 255, 256, 16_384, 70_000];

describe("libzmq asks, our listener answers", () => {
  const echo = () =>
    channel().listen({ host, port: 0, answer: async (frames) => [Buffer.from("echo"), ...frames] });

  test("a REQ, in several frames and sizes, with heartbeats", async () => {
    const { port } = await echo();
    const socket = own(
      new Request({
        linger: 0,
        heartbeatInterval: 5,
        heartbeatTimeout: 30_000,
        routingId: "a name",
      }),
    );
    socket.connect(`tcp://${host}:${port}`);
    for (const size of [0, 1, 255, 256, 4000]) {
      const frame = Buffer.alloc(size, "x");
      await socket.send([frame, "second"]);
      expect(text(await socket.receive())).toEqual(["echo", frame.toString(), "second"]);
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
  });

  test("a DEALER, with and without the empty frame, many requests at once", async () => {
    const { port } = await echo();
    const socket = own(new Dealer({ linger: 0 }));
    socket.connect(`tcp://${host}:${port}`);
    for (let at = 0; at < 500; at += 1) await socket.send(at % 2 === 0 ? ["", `${at}`] : [`${at}`]);
    for (let at = 0; at < 500; at += 1)
      expect(text(await socket.receive())).toEqual(
        at % 2 === 0 ? ["", "echo", `${at}`] : ["echo", `${at}`],
      );
  });

  test("a REQ that connects again after its idle connection was closed", async () => {
    const side = zmqSideChannel({ idleTimeoutMs: 300 });
    closers.push(() => side.close());
    const { port } = await side.listen({ host, port: 0, answer: (frames) => frames });
    const socket = own(new Request({ linger: 0 }));
    const closed = new Promise((resolve) => socket.events.on("disconnect", resolve));
    socket.connect(`tcp://${host}:${port}`);
    await socket.send("one");
    expect(text(await socket.receive())).toEqual(["one"]);
    await closed;
    await socket.send("two");
    expect(text(await socket.receive())).toEqual(["two"]);
  });
});

describe("our client asks, libzmq answers", () => {
  test.each([
    ["a ROUTER", () => new Router({ linger: 0, heartbeatInterval: 5, heartbeatTimeout: 30_000 })],
    ["a REP", () => new Reply({ linger: 0, heartbeatInterval: 5, heartbeatTimeout: 30_000 })],
  ])("%s, in several frames and sizes, with heartbeats", async (_, create) => {
    const socket = own(create());
    await socket.bind(`tcp://${host}:*`);
    void (async () => {
      for await (const frames of socket) await socket.send(frames);
    })().catch(() => {});
    const side = channel();
    const port = portOf(socket.lastEndpoint);
    const frames = SIZES.map((size) => Buffer.alloc(size, size % 251));
    for (let round = 0; round < 5; round += 1) {
      const reply = await side.request({ host, port, frames, timeoutMs: 20_000 });
      expect(reply.frames.map((frame) => Buffer.from(frame))).toEqual(frames);
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
  });
});

const python = process.env["KV_PYTHON"] ?? "python3";
const hasPyzmq = spawnSync(python, ["-c", "import zmq"]).status === 0;

/** Starts `pyzmq-peer.py`; returns its first line. */
async function pyzmqPeer(
  ...args: string[]
): Promise<{ line: string; exited: Promise<number | null> }> {
  const script = fileURLToPath(new URL("./pyzmq-peer.py", import.meta.url));
  const child = spawn(python, [script, ...args], { stdio: ["ignore", "pipe", "inherit"] });
  closers.push(() => child.kill());
  const exited = new Promise<number | null>((resolve) => child.on("exit", resolve));
  const { value } = await createInterface({ input: child.stdout })[Symbol.asyncIterator]().next();
  return { line: value as string, exited };
}

describe.skipIf(!hasPyzmq)(
  "pyzmq, as vLLM uses it (skipped without pyzmq in python3 or KV_PYTHON)",
  () => {
    test("its REQ asks our listener", async () => {
      const { port } = await channel().listen({
        host,
        port: 0,
        answer: (frames) => [...frames, Buffer.from("1.5")],
      });
      const { line, exited } = await pyzmqPeer("ask", `${port}`);
      expect(JSON.parse(line)).toEqual({ answered: 100 });
      expect(await exited).toBe(0);
    });

    test("its ROUTER answers our client", async () => {
      const { line } = await pyzmqPeer("answer");
      const side = channel();
      for (const size of SIZES) {
        const frame = Buffer.alloc(size, "x");
        const reply = await side.request({
          host,
          port: Number(line),
          frames: [frame],
          timeoutMs: 20_000,
        });
        expect(reply.frames.map((part) => Buffer.from(part))).toEqual([frame, Buffer.from("1.5")]);
      }
    });
  },
);
