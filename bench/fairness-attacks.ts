// What one client or publisher does at full size, in a process of its own, so that it does not delay who measures. Prints the endpoint of its publisher; then each line of its
// input is `{ attack, url }`, or `{}` to stop, and is answered when that is done.
import { once } from "node:events";
import { type AddressInfo, createServer } from "node:net";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { encodeMsgpack } from "@kv/protocol";
import { SMALL, send } from "./fairness-requests.js";

/** Something that one party does at full size until the signal aborts. */
type Attack = (url: string, publisher: Publisher, signal: AbortSignal) => Promise<void>;

const bodyOf = (members: object) => Buffer.from(JSON.stringify({ model: "m", ...members, max_tokens: 1 }));

const ATTACKS: Readonly<Record<string, Attack>> = {
  "KV events of 100,000 blocks, and their end": async (_url, publisher, signal) => {
    publisher.pour(signal);
    await once(signal, "abort");
  },
  "bodies of 225 KB with n: 256": async (url, _publisher, signal) => {
    const body = bodyOf({ prompt: "x".repeat(225_000), n: 256 });
    while (!signal.aborted) await send(url, body, signal).catch(() => sleep(10));
  },
  "bodies of 2,000,000 token ids": async (url, _publisher, signal) => {
    const body = bodyOf({ prompt: Array(2_000_000).fill(7) });
    while (!signal.aborted) await send(url, body, signal).catch(() => sleep(10));
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
};

interface Publisher {
  readonly endpoint: string;
  pour(signal: AbortSignal): void;
}

/** A PUB that sends valid batches as fast as they are read: 100,000 blocks, then that all are gone. */
async function startPublisher(): Promise<Publisher> {
  const blocks = {
    ...{ type: "BlockStored", parent_block_hash: null, block_size: 16, medium: "GPU" },
    block_hashes: Array.from({ length: 100_000 }, (_, at) => 1000 + at),
    token_ids: Array.from({ length: 1_600_000 }, (_, at) => at % 150_000),
  };
  const [stored, cleared] = [blocks, { type: "AllBlocksCleared" }].map((event) =>
    encodeMsgpack([1.5, [event], 0]),
  ) as [Uint8Array, Uint8Array];
  const greeting = Buffer.from(`ff00000000000000017f03014e554c4c${"00".repeat(48)}`, "hex");
  const ready = Buffer.from("04190552454144590b536f636b65742d5479706500000003505542", "hex");
  let sequence = 0n;
  let pouring: AbortSignal | undefined;
  let pour = () => {};
  const server = createServer((socket) => {
    socket.on("error", () => {}).resume();
    socket.write(Buffer.concat([greeting, ready]));
    pour = () => {
      while (pouring?.aborted === false) {
        const payload = sequence % 2n === 0n ? stored : cleared;
        const head = Buffer.alloc(21);
        head.set([1, 0, 1, 8]);
        head.writeBigUInt64BE(sequence++, 4);
        head.set([2], 12);
        head.writeBigUInt64BE(BigInt(payload.byteLength), 13);
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
process.stdout.write(`${publisher.endpoint}\n`);
let stop = new AbortController();
let running: Promise<void> | undefined;
for await (const line of createInterface({ input: process.stdin })) {
  const { attack, url } = JSON.parse(line) as { attack?: string; url: string };
  stop.abort();
  await running;
  stop = new AbortController();
  running = attack === undefined ? undefined : ATTACKS[attack]?.(url, publisher, stop.signal);
  process.stdout.write("done\n");
}
process.exit(0);
