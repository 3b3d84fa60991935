import { setTimeout as sleep } from "node:timers/promises";
import { type AttackResult, type FloodTarget, runAsScript } from "./support/attack.js";
import {
  attacker,
  observe,
  observedText,
  postText,
  startProxy,
  untilAborted,
} from "./support/attacked-proxy.js";

const CONNECTIONS = 100;
const BODY_BYTES = 15 << 20;
const PIECE = Buffer.alloc(1 << 20, "a");

async function round(url: string, holdMs: number): Promise<void> {
  const sockets = await Promise.all(
    Array.from({ length: CONNECTIONS }, () => attacker(url, postText('{"prompt":"', BODY_BYTES + 100))),
  );
  for (let sent = 0; sent < BODY_BYTES; sent += PIECE.length) {
    for (const socket of sockets) if (socket.writable && socket.writableLength === 0) socket.write(PIECE);
    await sleep(50);
  }
  await sleep(holdMs);
  for (const socket of sockets) socket.destroy();
}

/** Holds 100 bodies of 15 MiB that never end. */
export async function run(): Promise<AttackResult> {
  const proxy = await startProxy();
  try {
    const observed = await observe(proxy, () => round(proxy.url, 10_000));
    return {
      attack: "proxy: bodies that never end",
      tries: `${CONNECTIONS} connections, 15 MiB each`,
      result: observedText(observed),
      ok: observed.wrong === 0 && observed.grownMib <= 512 && observed.longestMs < 2_000,
    };
  } finally {
    proxy.close();
  }
}

export function flood({ proxyUrl }: FloodTarget, signal: AbortSignal): Promise<void> {
  return untilAborted(signal, () => round(proxyUrl, 2_000));
}

await runAsScript(import.meta.url, run);
