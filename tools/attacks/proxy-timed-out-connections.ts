import type { Socket } from "node:net";
import { setTimeout as sleep } from "node:timers/promises";
import { type AttackResult, type FloodTarget, runAsScript } from "./support/attack.js";
import { attacker, observe, observedText, startProxy, untilAborted } from "./support/attacked-proxy.js";

const CONNECTIONS = 2_000;

/** Connections that send a begin and never close their side. */
async function open(url: string): Promise<Socket[]> {
  const sockets: Socket[] = [];
  for (let at = 0; at < CONNECTIONS; at += 1) {
    const socket = await attacker(url, "POST /v1/completions HTTP/1.1\r\n");
    socket.allowHalfOpen = true;
    sockets.push(socket);
  }
  return sockets;
}

/** Opens 2,000 connections that time out, and keeps them half open. */
export async function run(): Promise<AttackResult> {
  const proxy = await startProxy();
  const sockets: Socket[] = [];
  try {
    const before = proxy.descriptors();
    const observed = await observe(proxy, async () => {
      sockets.push(...(await open(proxy.url)));
      // 10 s for the head, 2.5 s until Node looks, 2 s for the client to close.
      await sleep(17_000);
    });
    const kept = proxy.descriptors() - before;
    return {
      attack: "proxy: connections that time out and stay half open",
      tries: `${CONNECTIONS}`,
      result: `${kept} descriptors kept; ${observedText(observed)}`,
      ok: kept < 50 && observed.wrong === 0,
    };
  } finally {
    for (const socket of sockets) socket.destroy();
    proxy.close();
  }
}

export function flood({ proxyUrl }: FloodTarget, signal: AbortSignal): Promise<void> {
  return untilAborted(signal, async () => {
    const sockets = await open(proxyUrl);
    await sleep(5_000, undefined, { signal }).catch(() => {});
    for (const socket of sockets) socket.destroy();
  });
}

await runAsScript(import.meta.url, run);
