import { setTimeout as sleep } from "node:timers/promises";
import type { AttackResult, FloodTarget } from "./support/attack.js";
import { attackProxy, observedText, postText, untilAborted } from "./support/attacked-proxy.js";
import { strangerAt } from "./support/stranger.js";

const TIMES = 4;

function keys(lengthBytes: number): string {
  const members: string[] = [];
  for (let at = 0, length = 0; length < lengthBytes; at += 1) {
    const member = `"k${at}":1`;
    members.push(member);
    length += member.length + 1;
  }
  return `{"prompt":"a",${members.join(",")}}`;
}

/**
 * The largest bodies that are accepted: 60 MB are above the limit of a body, 15 MiB above that of
 * members, token ids and depth below all.
 */
const BODIES: readonly string[] = [
  keys(60_000_000),
  keys(15 << 20),
  `{"prompt":"a","x":{${keys(900_000).slice(1, -1)}}}`,
  `{"prompt":[${Array(2_000_000).fill("12345").join(",")}]}`,
  `{"prompt":"${"a".repeat(15 << 20)}"}`,
  `{"prompt":"a","x":${"[".repeat(8 << 20)}`,
];

async function round(url: string): Promise<void> {
  const sockets = await Promise.all(
    BODIES.flatMap((body) => Array.from({ length: TIMES }, () => strangerAt(url, postText(body)))),
  );
  for (const socket of sockets) socket.resume();
  await sleep(8_000);
  for (const socket of sockets) socket.destroy();
}

/** Sends bodies that take long to parse. */
export const run = (): Promise<AttackResult> =>
  attackProxy(
    ({ url }) => round(url),
    (seen) => ({
      attack: "proxy: bodies of small keys, many values, deep lists",
      tries: `${BODIES.length} kinds, 1 to 60 MB, ${TIMES} at once each`,
      result: observedText(seen),
      ok: seen.wrong === 0 && seen.longestMs < 2_000 && seen.grownMib <= 512,
    }),
  );

export function flood({ proxyUrl }: FloodTarget, signal: AbortSignal): Promise<void> {
  return untilAborted(signal, () => round(proxyUrl));
}
