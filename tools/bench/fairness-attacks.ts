// What one client, publisher or peer does at full size, in a process of its own, so that it does
// not delay who measures. Each line of its input is `{ attack, target }`, or `{}` to stop, and is
// answered with the endpoint of its publisher when that is done.
import { once } from "node:events";
import { type AddressInfo, createServer } from "node:net";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { nixlTransport } from "@kv/nixl";
import {
  decodeAgentMetadata,
  decodeHandshakeReply,
  encodeHandshakeRequest,
  encodeMsgpack,
  encodeNotification,
  encodePushRegistration,
} from "@kv/protocol";
import { zmqSideChannel } from "@kv/side-channel";
import { SMALL, send } from "./fairness.js";

type Attack = (target: string, publisher: Publisher, signal: AbortSignal) => Promise<void>;

const bodyOf = (members: object) =>
  Buffer.from(JSON.stringify({ model: "m", ...members, max_tokens: 1, stream: true }));

async function pour(
  url: string,
  body: Uint8Array<ArrayBuffer>,
  signal: AbortSignal,
): Promise<void> {
  while (!signal.aborted)
    await send(url, body, signal).catch((error: unknown) => {
      if (!signal.aborted) throw error;
    });
}

const ATTACKS: Readonly<Record<string, Attack>> = {
  "KV events of 100,000 blocks, and their end": async (_url, publisher, signal) => {
    publisher.pour(signal);
    await once(signal, "abort");
  },
  "bodies of 225 KB with n: 256": async (url, _publisher, signal) => {
    await pour(url, bodyOf({ prompt: "x".repeat(225_000), n: 256 }), signal);
  },
  "bodies of 2,000,000 token ids": async (url, _publisher, signal) => {
    await pour(url, bodyOf({ prompt: Array(2_000_000).fill(7) }), signal);
  },
  "8 clients that leave after 10 ms": async (url, _publisher, signal) => {
    const leave = async () => {
      while (!signal.aborted) {
        const leaving = AbortSignal.timeout(10);
        await send(url, SMALL, leaving).catch(() => {});
        await sleep(10);
      }
    };
    await Promise.all(Array.from({ length: 8 }, leave));
  },
  "registrations of 700,000 blocks": (port, _publisher, signal) => register(port, signal),
};

/**
 * An agent that registers blocks at the P whose side channel is at `port`, for requests that never
 * come.
 */
async function register(port: string, signal: AbortSignal): Promise<void> {
  const sideChannel = zmqSideChannel();
  const frames = [encodeHandshakeRequest({ ppRank: 0, tpRank: 0 })];
  const to = { host: "127.0.0.1", port: Number(port), frames, timeoutMs: 5000 };
  const { payload } = decodeHandshakeReply((await sideChannel.request(to)).frames);
  await sideChannel.close();
  const transport = nixlTransport();
  const agent = await transport.createAgent();
  const metadata = decodeAgentMetadata(payload.agentMetadataBytes);
  const name = await agent.addRemote(metadata.agentMetadata);
  const localBlockIds = [Array.from({ length: 700_000 }, (_, at) => at)];
  for (let serial = 0; !signal.aborted; serial += 1) {
    const registration = encodePushRegistration({
      requestId: `never-${serial}`,
      localBlockIds,
      transferId: undefined,
      rest: {},
      decodeEngineId: "bench",
      decodeHost: "127.0.0.1",
      decodePort: 1,
      decodeTpSize: 1,
      remoteEngineId: "p",
      remoteHost: "127.0.0.1",
      remotePort: to.port,
      remoteTpSize: 1,
      remotePpSize: 1,
    });
    await agent.notify(name, encodeNotification({ kind: "push-registration", registration }));
    await sleep(1);
  }
  await transport.close();
}

interface Publisher {
  readonly endpoint: string;
  pour(signal: AbortSignal): void;
}

/**
 * A PUB that sends valid batches as fast as they are read: 100,000 blocks, then that all are gone.
 */
async function startPublisher(): Promise<Publisher> {
  const blocks = {
    type: "BlockStored",
    parent_block_hash: null,
    block_size: 16,
    medium: "GPU",
    block_hashes: Array.from({ length: 100_000 }, (_, at) => 1000 + at),
    token_ids: Array.from({ length: 1_600_000 }, (_, at) => at % 150_000),
  };
  const batches = [blocks, { type: "AllBlocksCleared" }].map((event) =>
    encodeMsgpack([1.5, [event], 0]),
  );
  const greeting = `ff00000000000000017f03014e554c4c${"00".repeat(48)}`;
  const ready = "04190552454144590b536f636b65742d5479706500000003505542";
  let sequence = 0;
  let pouring: AbortSignal | undefined;
  let pour = () => {};
  const server = createServer((socket) => {
    socket.on("error", () => {}).resume();
    socket.write(Buffer.from(greeting + ready, "hex"));
    pour = () => {
      while (pouring?.aborted === false) {
        const payload = batches[sequence % 2] as Uint8Array;
        // An empty topic, the sequence number and the payload, each a frame.
        const head = Buffer.from([1, 0, 1, 8, ...Array(8), 2, ...Array(8)]);
        head.writeBigUInt64BE(BigInt(sequence), 4);
        head.writeBigUInt64BE(BigInt(payload.byteLength), 13);
        sequence += 1;
        socket.write(head);
        if (!socket.write(payload)) return;
      }
    };
    socket.on("drain", pour);
  }).listen(0, "127.0.0.1");
  await once(server, "listening");
  return {
    endpoint: `tcp://127.0.0.1:${(server.address() as AddressInfo).port}`,
    pour(signal) {
      pouring = signal;
      pour();
    },
  };
}

const publisher = await startPublisher();
let stop = new AbortController();
let running: Promise<void> | undefined;
for await (const line of createInterface({ input: process.stdin })) {
  const { attack, target } = JSON.parse(line) as { attack?: string; target: string };
  stop.abort();
  await running;
  stop = new AbortController();
  running = attack === undefined ? undefined : ATTACKS[attack]?.(target, publisher, stop.signal);
  process.stdout.write(`${JSON.stringify(publisher.endpoint)}\n`);
}
process.exit(0);
