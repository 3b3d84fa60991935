import { once } from "node:events";
import { connect, type Socket } from "node:net";
import { afterEach, expect, test } from "vitest";
import {
  fetchMetadata,
  listenForMetadata,
  type MetadataAgent,
  type MetadataListener,
  type MetadataListenerOptions,
} from "./socket-metadata.js";

const HOST = "127.0.0.1";
/** An agent whose metadata is its name. */
const agent: MetadataAgent = {
  name: "owner",
  localMetadata: async () => Buffer.from("owner"),
  addRemote: async (metadata) => Buffer.from(metadata).toString(),
  removeRemote: async () => {},
};
const sockets: Socket[] = [];
let listener: MetadataListener | undefined;

afterEach(async () => {
  for (const socket of sockets.splice(0)) socket.destroy();
  await listener?.close();
});

/** Listens with these limits; returns the listener's address. */
async function listen(limits: MetadataListenerOptions["limits"]) {
  listener = await listenForMetadata(agent, { limits });
  return { host: HOST, port: listener.port };
}

/** A connection that says nothing, once it is there. */
async function silent(port: number, localAddress = HOST): Promise<Socket> {
  const socket = connect({ host: HOST, port, localAddress });
  sockets.push(socket);
  await once(socket.resume(), "connect");
  return socket;
}

test("maxConnections: one more is ended, and another is accepted once one has gone", async () => {
  const at = await listen({ maxConnections: 1 });
  const first = await silent(at.port);
  await once(await silent(at.port, "127.0.0.2"), "close");
  first.destroy();
  await expect.poll(() => fetchMetadata(agent, at).catch(() => undefined)).toBe("owner");
});

test("maxConnectionsPerAddress: one more of an address is ended, and other addresses are served", async () => {
  const at = await listen({ maxConnectionsPerAddress: 1 });
  await silent(at.port, "127.0.0.2");
  await once(await silent(at.port, "127.0.0.2"), "close");
  expect(await fetchMetadata(agent, at)).toBe("owner");
});

test("maxFrameBytes: a longer message ends its connection before it has come", async () => {
  const at = await listen({ maxFrameBytes: 13 });
  expect(await fetchMetadata(agent, at)).toBe("owner");
  const socket = await silent(at.port);
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(14n);
  socket.write(length);
  await once(socket, "close");
});

test("frameMs: a message that does not end in time ends its connection", async () => {
  const at = await listen({ frameMs: 20 });
  const socket = await silent(at.port);
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(100n);
  socket.write(length);
  // Bytes that come slowly do not prolong it. Those that come after its end reset it.
  const trickle = setInterval(() => socket.write("N"), 5);
  await new Promise((resolve) => socket.once("error", () => {}).once("close", resolve));
  clearInterval(trickle);
});

test("idleMs: a connection that says nothing is ended", async () => {
  const at = await listen({ idleMs: 20 });
  await once(await silent(at.port), "close");
});
