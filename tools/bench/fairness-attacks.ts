// What one publisher or peer does at full size. Each line of the input is `{ attack, target
// }`, or `{}` to stop, and is answered with the endpoint of the publisher.
import { once } from "node:events";
import { createServer } from "node:net";
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
import { listening } from "@kv/testing/http/listening";

type Attack = (target: string, publisher: Publisher, signal: AbortSignal) => Promise<void>;

const ATTACKS: Readonly<Record<string, Attack>> = {
  "KV events of 100,000 blocks, and their end": async (_port, publisher, signal) => {
    publisher.pour(signal);
    await once(signal, "abort");
  },
  "registrations of 700,000 blocks": (port, _publisher, signal) => register(port, signal),
};

/** Registers blocks at the P whose side channel is at `port`, for requests that never come. */
async function register(port: string, signal: AbortSignal) {
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

/** 100,000 blocks, then that all are gone, as fast as they are read. */
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
  });
  return {
    endpoint: `tcp://127.0.0.1:${await listening(server)}`,
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
