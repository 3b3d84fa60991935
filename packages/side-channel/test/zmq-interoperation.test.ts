import { spawn, spawnSync } from "node:child_process";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import { afterEach, describe, expect, test } from "vitest";
import { capability, Dealer, Reply, Request, Router } from "zeromq";
import { type CurveKeyPair, curveKeysOf } from "../src/zmtp/curve.js";
import {
  channel,
  closeAll,
  closers,
  failure,
  host,
  listen,
  OTHER,
  OWN,
  own,
  talker,
  until,
} from "./set-up.js";

// Our side channel with libzmq on the other end: through the zeromq package, and through pyzmq,
// which vLLM uses.

afterEach(closeAll);
const text = (frames: readonly Uint8Array[]) =>
  frames.map((frame) => Buffer.from(frame).toString());
const portOf = (endpoint: string | null) => Number(endpoint?.split(":").at(-1));
const wait = () => new Promise((resolve) => setTimeout(resolve, 20));

/** The text form of a key that libzmq's options take (RFC 32). */
function z85(bytes: Uint8Array): string {
  const digits =
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#";
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  let text = "";
  for (let at = 0; at < bytes.byteLength; at += 4)
    for (let power = 4; power >= 0; power -= 1)
      text += digits[Math.floor(view.getUint32(at) / 85 ** power) % 85];
  return text;
}
const keysForLibzmq = ({ publicKey, privateKey }: CurveKeyPair) => ({
  curvePublicKey: z85(publicKey),
  curveSecretKey: z85(
    Uint8Array.from(Buffer.from(privateKey.export({ format: "jwk" }).d ?? "", "base64url")),
  ),
});

const { server, client } = curveKeysOf(OWN);
const asClient = { ...keysForLibzmq(client), curveServerKey: z85(server.publicKey) };
const asServer = { ...keysForLibzmq(server), curveServer: true };
const HEARTBEATS = { linger: 0, heartbeatInterval: 5, heartbeatTimeout: 30_000 };
/** Frames on both sides of each limit of the encoding. */
const SIZES = [0, 1, 222, 223, 255, 256, 4000];

describe.each([
  { mechanism: "NULL", keys: undefined, ofClient: {}, ofServer: {}, isMissing: false },
  {
    mechanism: "CURVE",
    keys: [OWN],
    ofClient: asClient,
    ofServer: asServer,
    isMissing: capability.curve !== true,
  },
])("libzmq with $mechanism", ({ keys, ofClient, ofServer, isMissing }) => {
  test.skipIf(isMissing)(
    "its REQ asks our listener, in several frames and sizes, with heartbeats",
    async () => {
      const { port } = await talker(keys).echo();
      const socket = own(new Request({ ...HEARTBEATS, routingId: "a name", ...ofClient }));
      socket.connect(`tcp://${host}:${port}`);
      for (const size of SIZES) {
        const frame = Buffer.alloc(size, "x");
        await socket.send([frame, "second"]);
        expect(text(await socket.receive())).toEqual(["echo", frame.toString(), "second"]);
        await wait();
      }
    },
  );

  test.skipIf(isMissing)(
    "its DEALER asks, with and without the empty frame, many requests at once",
    async () => {
      const { port } = await talker(keys).echo();
      const socket = own(new Dealer({ linger: 0, ...ofClient }));
      socket.connect(`tcp://${host}:${port}`);
      const asked = Array.from({ length: 500 }, (_, at) => `${at}`);
      for (const [at, word] of asked.entries()) await socket.send(at % 2 === 0 ? ["", word] : word);
      for (const [at, word] of asked.entries())
        expect(text(await socket.receive())).toEqual([...(at % 2 === 0 ? [""] : []), "echo", word]);
    },
  );

  test.skipIf(isMissing).each([
    ["ROUTER", () => new Router({ ...HEARTBEATS, ...ofServer })],
    ["REP", () => new Reply({ ...HEARTBEATS, ...ofServer })],
  ])(
    "its %s answers our client, in several frames and sizes, with heartbeats",
    async (_, create) => {
      const socket = own(create());
      await socket.bind(`tcp://${host}:*`);
      void (async () => {
        for await (const frames of socket) await socket.send(frames);
      })().catch(() => {});
      const { ask } = talker(keys);
      const words = [...SIZES, 16_384, 70_000].map((size) => "x".repeat(size));
      for (let round = 0; round < 5; round += 1) {
        expect(await ask(portOf(socket.lastEndpoint), ...words)).toEqual(words);
        await wait();
      }
    },
  );
});

describe.skipIf(capability.curve !== true)("libzmq that lacks our key", () => {
  test.each([
    ["without CURVE, as vLLM's", {}, /NULL.*CURVE|CURVE.*NULL/],
    [
      "with a client key that is not accepted",
      { ...asClient, ...keysForLibzmq(curveKeysOf(OTHER).client) },
      "client key",
    ],
    [
      "with another server key",
      { ...asClient, curveServerKey: z85(curveKeysOf(OTHER).server.publicKey) },
      "server key",
    ],
  ])("its REQ %s is refused", async (_, keys, why) => {
    const { echo, warnings } = talker([OWN]);
    const { port } = await echo();
    const socket = own(new Request({ linger: 0, ...keys }));
    socket.connect(`tcp://${host}:${port}`);
    await socket.send("hello");
    await until(() => warnings.length > 0);
    expect(String(warnings[0]?.["error"])).toMatch(why);
    expect(warnings[0]?.["hint"]).toContain("handshake_key_file");
  });

  test.each([
    ["without CURVE, as vLLM's", {}, /NULL.*CURVE|CURVE.*NULL/],
    [
      "with another key",
      { ...keysForLibzmq(curveKeysOf(OTHER).server), curveServer: true },
      "ended the CURVE handshake",
    ],
  ])("its ROUTER %s is refused", async (_, keys, why) => {
    const socket = own(new Router({ linger: 0, ...keys }));
    await socket.bind(`tcp://${host}:*`);
    const error = await failure(talker([OWN]).ask(portOf(socket.lastEndpoint), "hello"));
    expect(error.message).toMatch(why);
    expect(error.hint).toContain("handshake_key_file");
  });
});

test("a REQ of libzmq connects again after its idle connection was closed", async () => {
  const side = channel({ idleTimeoutMs: 300 });
  const { port } = await listen(side);
  const socket = own(new Request({ linger: 0 }));
  const closed = new Promise((resolve) => socket.events.on("disconnect", resolve));
  socket.connect(`tcp://${host}:${port}`);
  await socket.send("one");
  expect(text(await socket.receive())).toEqual(["one"]);
  await closed;
  await socket.send("two");
  expect(text(await socket.receive())).toEqual(["two"]);
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
      const { port } = await listen(channel(), (frames) => [...frames, Buffer.from("1.5")]);
      const { line, exited } = await pyzmqPeer("ask", `${port}`);
      expect(JSON.parse(line)).toEqual({ answered: 100 });
      expect(await exited).toBe(0);
    });

    test("its ROUTER answers our client", async () => {
      const { line } = await pyzmqPeer("answer");
      const { ask } = talker();
      for (const size of [...SIZES, 16_384, 70_000]) {
        const word = "x".repeat(size);
        expect(await ask(Number(line), word)).toEqual([word, "1.5"]);
      }
    });
  },
);
