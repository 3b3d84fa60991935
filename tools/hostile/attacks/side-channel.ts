import { createServer } from "node:net";
import { setTimeout as sleep } from "node:timers/promises";
import { listening } from "@kv/testing/http/listening";
import type { Check } from "../row.js";
import type { Attack } from "./attack.js";
import { stranger, strangers } from "./strangers.js";

const MIB = 2 ** 20;
/** The greeting of ZMTP 3.1 with the mechanism NULL. */
const GREETING = Buffer.from(`ff00000000000000017f03014e554c4c${"00".repeat(48)}`, "hex");
const GREETED = Buffer.concat([GREETING, readyOf("REQ")]);

function readyOf(socketType: string): Buffer {
  const properties = `\x05READY\x0bSocket-Type\0\0\0${String.fromCharCode(socketType.length)}`;
  const body = Buffer.from(`${properties}${socketType}\x08Identity\0\0\0\0`, "latin1");
  return Buffer.concat([Buffer.from([4, body.length]), body]);
}

/** Frames of 4,000 bytes, each with MORE: a message without end. */
const MORE_FRAMES = Buffer.alloc(16 * 4009);
for (let at = 0; at < MORE_FRAMES.length; at += 4009)
  MORE_FRAMES.set([3, 0, 0, 0, 0, 0, 0, 0x0f, 0xa0], at);
/** A message of 200,000 empty frames. */
const EMPTY_FRAMES = Buffer.alloc(400_000, Buffer.from([1, 0]));
EMPTY_FRAMES[EMPTY_FRAMES.length - 2] = 0;

async function pour(port: number, chunk: Buffer, bytes: number): Promise<number> {
  const socket = await stranger(port, GREETED);
  let sent = 0;
  const write = () => {
    while (sent < bytes && !socket.destroyed) {
      sent += chunk.length;
      if (!socket.write(chunk)) return;
    }
    socket.destroy();
  };
  socket.once("data", write).on("drain", write).resume();
  if (!socket.destroyed) await new Promise((resolve) => socket.once("close", resolve));
  return sent;
}

/** `restMs`: what was received may still be worked on. */
const pouredFrames = (what: string, frames: Buffer, mib: number, restMs = 0): Attack => ({
  title: `side channel: ${what}`,
  victim: "side-channel",
  tries: `${mib} MiB, or 20 s`,
  async round({ sideChannel }) {
    const untilMs = Date.now() + 20_000;
    let left = mib * MIB;
    let connections = 0;
    for (; left > 0 && Date.now() < untilMs; connections += 1)
      left -= await pour(sideChannel, frames, left);
    await sleep(restMs);

    return [[`${mib - Math.round(left / MIB)} MiB on ${connections} connections`, connections > 0]];
  },
});

const keptConnections = (kind: string, begin: Buffer): Attack => ({
  title: `side channel: connections that are kept, ${kind}`,
  victim: "side-channel",
  // Together more than a process has descriptors.
  tries: "10200 connections of each of 2 processes",
  attackers: 2,
  async round({ sideChannel }) {
    const sockets = await strangers(10_200, sideChannel, begin);
    for (const socket of sockets) socket.resume();
    await sleep(8_000);
  },
});

const REPLIES = {
  "frames of 1 MiB with MORE": Buffer.concat([
    Buffer.from("030000000000100000", "hex"),
    Buffer.alloc(MIB),
  ]),
  "empty frames": Buffer.alloc(MIB, Buffer.from([1, 0])),
};
/** The client's greeting and READY. */
const GREETED_BYTES = 104;

async function hostileListener(chunk: Buffer) {
  let sent = 0;
  const server = createServer((socket) => {
    socket.write(Buffer.concat([GREETING, readyOf("ROUTER")]));
    const write = () => {
      while (!socket.destroyed) {
        sent += chunk.length;
        if (!socket.write(chunk)) return;
      }
    };
    let received = 0;
    socket.on("data", (data) => {
      const isFirst = received <= GREETED_BYTES;
      received += data.length;
      if (isFirst && received > GREETED_BYTES) write();
    });
    socket.on("error", () => {}).on("drain", write);
  });
  return { port: await listening(server), sentMib: () => Math.round(sent / MIB) };
}

const hostileReplies: Attack = {
  title: "side channel: a hostile listener towards our client",
  victim: "side-channel",
  floods: false,
  tries: "3 requests per kind of reply",
  async round({ clientUrl }) {
    const checks: Check[] = [];
    for (const [name, chunk] of Object.entries(REPLIES)) {
      const { port, sentMib } = await hostileListener(chunk);
      const answer = await fetch(`${clientUrl}/ask/${port}`);
      const refused = Number(await answer.text());
      checks.push([`${refused} refused of 3, ${sentMib()} MiB of ${name}`, refused === 3]);
    }
    return checks;
  },
};

export const SIDE_CHANNEL_ATTACKS: Readonly<Record<string, Attack>> = {
  "side-channel-connections-greeted": keptConnections("greeted", GREETED),
  "side-channel-connections-half": keptConnections("half greeted", GREETING.subarray(0, 20)),
  "side-channel-empty-frames": pouredFrames(
    "messages of 200,000 empty frames",
    EMPTY_FRAMES,
    209,
    15_000,
  ),
  "side-channel-hostile-listener": hostileReplies,
  "side-channel-more-frames": pouredFrames("frames with MORE without end", MORE_FRAMES, 2048),
};
