import { setTimeout as sleep } from "node:timers/promises";
import type { AttackResult, FloodTarget } from "./support/attack.js";
import { attackProxy, observedText, postText, untilAborted } from "./support/attacked-proxy.js";
import { strangerAt } from "./support/stranger.js";

const CONNECTIONS = 100;
const BODY_BYTES = 15 << 20;
const PIECE = Buffer.alloc(1 << 20, "a");

async function round(url: string, holdMs: number): Promise<void> {
  const sockets = await Promise.all(
    Array.from({ length: CONNECTIONS }, () =>
      strangerAt(url, postText('{"prompt":"', BODY_BYTES + 100)),
    ),
  );
  for (let sent = 0; sent < BODY_BYTES; sent += PIECE.length) {
    for (const socket of sockets)
      if (socket.writable && socket.writableLength === 0) socket.write(PIECE);
    await sleep(50);
  }
  await sleep(holdMs);
  for (const socket of sockets) socket.destroy();
}

/** Holds 100 bodies of 15 MiB that never end. */
export const run = (): Promise<AttackResult> =>
  attackProxy(
    ({ url }) => round(url, 10_000),
    (seen) => ({
      attack: "proxy: bodies that never end",
      tries: `${CONNECTIONS} connections, 15 MiB each`,
      result: observedText(seen),
      ok: seen.wrong === 0 && seen.grownMib <= 512 && seen.longestMs < 2_000,
    }),
  );

export function flood({ proxyUrl }: FloodTarget, signal: AbortSignal): Promise<void> {
  return untilAborted(signal, () => round(proxyUrl, 2_000));
}
