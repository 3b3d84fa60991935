import { setTimeout as sleep } from "node:timers/promises";
import { request } from "undici";
import { descriptors } from "../observed-process.js";
import type { Check } from "../row.js";
import type { Attack, Target } from "./attack.js";
import { portOf, postText, stranger, strangers } from "./strangers.js";

const SLOW = postText('{"prompt":"slow","max_tokens":1}');

/** A demo's P does not count. */
async function countsOf({ countsUrl }: Target) {
  if (countsUrl === undefined) return undefined;
  return (await (await fetch(countsUrl)).json()) as { slow: number; slowMs: number };
}

const ABANDONED_MS = 15_000;
const ABORTING_CLIENTS = 4;

const EVIL = { host: "evil.example:9090", "content-type": "application/json" };
/** What a page of another site can have a browser send, and the refusal. */
const OF_BROWSERS: readonly (readonly [headers: Record<string, string>, status: number])[] = [
  [{ ...EVIL, origin: "http://evil.example:9090" }, 403],
  [EVIL, 403],
  [{ origin: "http://evil.example", "content-type": "application/json" }, 403],
  [{ origin: "null", "content-type": "application/json" }, 403],
  [{ "content-type": "text/plain" }, 415],
  [{ "content-type": "application/x-www-form-urlencoded" }, 415],
];

const HELD_BYTES = 15 << 20;

function keys(lengthBytes: number): string {
  const members: string[] = [];
  for (let length = 0; length < lengthBytes; length += (members.at(-1)?.length ?? 0) + 1)
    members.push(`"k${members.length}":1`);
  return members.join(",");
}

export const PROXY_ATTACKS: Readonly<Record<string, Attack>> = {
  "proxy-aborted-prefills": {
    title: "proxy: clients that abort during prefill",
    tries: `${ABORTING_CLIENTS} clients for 25 s`,
    async round(target) {
      const untilMs = Date.now() + 25_000;
      const clients = Array.from({ length: ABORTING_CLIENTS }, async () => {
        while (Date.now() < untilMs) {
          const socket = await stranger(portOf(target.proxyUrl), SLOW);
          await sleep(200 * Math.random());
          socket.destroy();
        }
      });
      await Promise.all(clients);

      const counts = await countsOf(target);
      if (counts === undefined) return;
      // Four more may be under way at the limit, and P hears later that a client has left.
      const isLimited = counts.slowMs <= ABANDONED_MS + 3_000;
      return [[`P worked ${counts.slowMs} ms for ${counts.slow} requests`, isLimited]];
    },
  },
  "proxy-admin-rebinding": {
    title: "proxy: admin port through a browser (DNS rebinding, other origins, forms)",
    tries: "22 requests",
    rounds: 20,
    async round({ adminUrl }) {
      const body = '{"role":"decode","instance":"127.0.0.1:1"}';
      const changes = ["add", "drain", "remove"].flatMap((what) =>
        OF_BROWSERS.map(
          ([headers, status]) =>
            [`/instances/${what}`, { method: "POST", headers, body } as const, status] as const,
        ),
      );
      const reads = ["/status", "/requests", "/metrics", "/events"].map(
        (path) => [path, { headers: EVIL }, 403] as const,
      );

      const passed: Check[] = [];
      for (const [path, options, wanted] of [...changes, ...reads]) {
        const { statusCode, body: answer } = await request(`${adminUrl}${path}`, options);
        await answer.dump();
        if (statusCode !== wanted)
          passed.push([`${path} ${JSON.stringify(options.headers)}: ${statusCode}`, false]);
      }
      return passed;
    },
  },
  "proxy-held-bodies": {
    title: "proxy: bodies that never end",
    tries: "100 connections, 15 MiB each",
    async round({ proxyUrl }) {
      const piece = Buffer.alloc(1 << 20, "a");
      const begin = postText('{"prompt":"', HELD_BYTES + 100);
      const sockets = await strangers(100, portOf(proxyUrl), begin);

      for (let sent = 0; sent < HELD_BYTES; sent += piece.length) {
        for (const socket of sockets)
          if (socket.writable && socket.writableLength === 0) socket.write(piece);
        await sleep(50);
      }
      await sleep(10_000);
    },
  },
  "proxy-pipelined": {
    title: "proxy: pipelined requests on one connection",
    tries: "3 times 30000",
    mostDescriptors: 199,
    async round(target) {
      for (let time = 0; time < 3; time += 1) {
        const socket = await stranger(portOf(target.proxyUrl), SLOW.repeat(30_000));
        socket.resume();
        await sleep(3_000);
        socket.destroy();
      }

      const counts = await countsOf(target);
      return counts && [[`${counts.slow} reached P`, counts.slow <= 3]];
    },
  },
  "proxy-small-keys": {
    title: "proxy: bodies of small keys, many values, deep lists",
    tries: "6 kinds, 1 to 60 MB, 4 at once each",
    async round({ proxyUrl }) {
      // The largest bodies that are accepted, and some that are just above a limit.
      const bodies = [
        `{"prompt":"a",${keys(60_000_000)}}`,
        `{"prompt":"a",${keys(15 << 20)}}`,
        `{"prompt":"a","x":{${keys(900_000)}}}`,
        `{"prompt":[${Array(2_000_000).fill("12345").join(",")}]}`,
        `{"prompt":"${"a".repeat(15 << 20)}"}`,
        `{"prompt":"a","x":${"[".repeat(8 << 20)}`,
      ];
      const sent = bodies.map((body) => strangers(4, portOf(proxyUrl), postText(body)));
      for (const socket of (await Promise.all(sent)).flat()) socket.resume();
      await sleep(8_000);
    },
  },
  "proxy-timed-out-connections": {
    title: "proxy: connections that time out and stay half open",
    tries: "2000 connections",
    async round({ proxyUrl, pid }) {
      const before = descriptors(pid);
      const begin = "POST /v1/completions HTTP/1.1\r\n";
      for (const socket of await strangers(2_000, portOf(proxyUrl), begin))
        socket.allowHalfOpen = true;
      // 10 s for the head, 2.5 s until Node looks, 2 s for the client.
      await sleep(17_000);

      const kept = descriptors(pid) - before;
      return [[`${kept} descriptors kept`, kept < 50]];
    },
  },
};
