import { once } from "node:events";
import { connect } from "node:net";
import { KvError, type LogFields } from "@kv/interface";
import {
  fetchMetadata,
  findLibrary,
  invalidateMetadata,
  listenForMetadata,
  type NixlAgent,
  nixlTransport,
  sendMetadata,
} from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { startMetadataPeer } from "../support/metadata-peer.js";

const HOST = "127.0.0.1";
const codeOf = async (promise: Promise<unknown>) => {
  const error = await promise.then(
    () => undefined,
    (reason: unknown) => reason,
  );
  return KvError.is(error) ? error.code : error;
};

describe.skipIf(nixlMissing)(`metadata by socket (${nixlMissing ?? "found"})`, () => {
  const transport = nixlTransport({ backends: ["UCX"] });
  let one: NixlAgent;
  let two: NixlAgent;
  beforeAll(async () => {
    one = await transport.createAgent();
    two = await transport.createAgent();
  });
  afterAll(() => transport.close());

  test("an agent fetches the metadata of a listener, sends its own, and withdraws it", async () => {
    const changes: string[][] = [];
    await using listener = await listenForMetadata(two, {
      onPeer: (name, change) => changes.push([name, change]),
    });
    const at = { host: HOST, port: listener.port };
    expect(await fetchMetadata(one, at)).toBe(two.name);
    await sendMetadata(one, at);
    await expect.poll(() => changes).toEqual([[one.name, "added"]]);
    await two.notify(one.name, Buffer.from("known"));
    for await (const { payload } of one.notifications()) {
      expect(Buffer.from(payload).toString()).toBe("known");
      break;
    }
    await invalidateMetadata(one, at);
    await expect.poll(() => changes.length).toBe(2);
    expect(await codeOf(two.notify(one.name, Buffer.from("gone")))).toBe("KV_AGENT_UNKNOWN_REMOTE");
  });

  test("an agent with NIXL's own listen thread is understood, and understands", async () => {
    const found = await findLibrary();
    const free = await listenForMetadata(one);
    const { port } = free;
    await free.close();
    const peer = await startMetadataPeer({ library: found, name: "nixl-listener", port });
    const at = { host: HOST, port };
    expect(await fetchMetadata(one, at)).toBe("nixl-listener");
    await sendMetadata(one, at);
    expect(await peer.ask(`wait ${one.name}`)).toBe(true);
    await invalidateMetadata(one, at);
    expect(await peer.ask(`forgotten ${one.name}`)).toBe(true);

    const changes: string[][] = [];
    await using mine = await listenForMetadata(two, {
      onPeer: (name, change) => changes.push([name, change]),
    });
    expect(await peer.ask(`send ${HOST} ${mine.port}`)).toBe(0);
    await expect.poll(() => changes).toEqual([["nixl-listener", "added"]]);
    expect(await peer.ask(`fetch ${two.name} ${HOST} ${mine.port}`)).toBe(0);
    expect(await peer.ask(`wait ${two.name}`)).toBe(true);
    // What was loaded is of use: its memory can be read.
    const memory = transport.allocate(peer.lengthBytes);
    await two.register(memory);
    const row = (address: number) => ({
      memoryType: "DRAM" as const,
      rows: Float64Array.of(address, peer.lengthBytes, 0, peer.lengthBytes, 1),
    });
    const local = await two.prepareLocal(row(memory.address));
    const remote = await two.prepareRemote("nixl-listener", row(peer.address));
    await two.transfer({ operation: "READ", local, runs: Int32Array.of(0, 0, 1), remote }).done;
    expect(Buffer.from(memory.bytes).toString()).toBe("p".repeat(peer.lengthBytes));
    await local.close();
    await remote.close();
    expect(await peer.ask(`invalidate ${HOST} ${mine.port}`)).toBe(0);
    await expect.poll(() => changes.length).toBe(2);
    await peer.end();
  });

  test("damaged messages end their connection, are logged, and nothing else happens", async () => {
    const logged: LogFields[] = [];
    const silent = { debug() {}, info() {}, error() {} };
    const log = {
      ...silent,
      warn: (_: string, fields?: LogFields) => void logged.push(fields ?? {}),
    };
    await using listener = await listenForMetadata(two, { log });
    const frame = (body: string) => {
      const head = Buffer.alloc(8);
      head.writeBigUInt64LE(BigInt(body.length));
      return Buffer.concat([head, Buffer.from(body, "latin1")]);
    };
    const tooLong = Buffer.alloc(8);
    tooLong.writeBigUInt64LE(2n ** 40n);
    const wrong = [
      frame("hello"),
      frame("NIXLCOMM:WHAT"),
      frame("NIXLCOMM:LOADnot metadata"),
      frame("NIXLCOMM:INVLnobody"),
      tooLong,
    ];
    for (const bytes of wrong) {
      const socket = connect(listener.port, HOST);
      socket.resume();
      socket.write(bytes);
      await once(socket, "close");
    }
    expect(logged.map(({ error }) => String(error).slice(0, 40)).length).toBe(wrong.length);
    expect(await fetchMetadata(one, { host: HOST, port: listener.port })).toBe(two.name);
  });

  test("a message may come byte by byte, and two in one piece", async () => {
    await using listener = await listenForMetadata(two);
    const socket = connect(listener.port, HOST);
    const head = Buffer.alloc(8);
    head.writeBigUInt64LE(13n);
    const frame = Buffer.concat([head, Buffer.from("NIXLCOMM:SEND")]);
    for (const byte of frame) socket.write(Buffer.of(byte));
    socket.end(Buffer.concat([frame, frame]));
    let bytes = 0;
    for await (const chunk of socket) bytes += (chunk as Buffer).length;
    const one = (await two.localMetadata()).length + 21;
    expect(bytes).toBe(3 * one);
  });

  test("nobody listens, nobody answers, and wrong options have errors of their own", async () => {
    const listener = await listenForMetadata(two);
    const at = { host: HOST, port: listener.port };
    expect(await codeOf(listenForMetadata(two, { port: listener.port }))).toBe(
      "KV_SIDE_CHANNEL_BIND_FAILED",
    );
    await listener.close();
    expect(await codeOf(fetchMetadata(one, at))).toBe("KV_SIDE_CHANNEL_UNREACHABLE");
    const mute = await listenForMetadata({
      ...two,
      localMetadata: () => new Promise<Uint8Array>(() => {}),
    });
    const late = fetchMetadata(one, { host: HOST, port: mute.port }, { timeoutMs: 50 });
    expect(await codeOf(late)).toBe("KV_SIDE_CHANNEL_TIMEOUT");
    await mute.close();
    expect(await codeOf(sendMetadata(one, { host: HOST, port: 70_000 }))).toBe("KV_CONFIG_INVALID");
    expect(await codeOf(listenForMetadata(two, { port: -1 }))).toBe("KV_CONFIG_INVALID");
  });
});
