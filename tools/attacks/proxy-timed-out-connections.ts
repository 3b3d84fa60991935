import type { Socket } from "node:net";
import { setTimeout as sleep } from "node:timers/promises";
import type { AttackResult, FloodTarget } from "./support/attack.js";
import { attackProxy, observedText, untilAborted } from "./support/attacked-proxy.js";
import { strangerAt } from "./support/stranger.js";

const CONNECTIONS = 2_000;

/** Connections that send a begin and never close their side. */
async function open(url: string): Promise<Socket[]> {
  const sockets: Socket[] = [];
  for (let at = 0; at < CONNECTIONS; at += 1) {
    const socket = await strangerAt(url, "POST /v1/completions HTTP/1.1\r\n");
    socket.allowHalfOpen = true;
    sockets.push(socket);
  }
  return sockets;
}

/** Opens 2,000 connections that time out, and keeps them half open. */
export async function run(): Promise<AttackResult> {
  const sockets: Socket[] = [];
  let before = 0;
  return await attackProxy(
    async (proxy) => {
      before = proxy.descriptors();
      sockets.push(...(await open(proxy.url)));
      // 10 s for the head, 2.5 s until Node looks, 2 s for the client to close.
      await sleep(17_000);
    },
    (seen, proxy) => {
      const kept = proxy.descriptors() - before;
      for (const socket of sockets) socket.destroy();
      return {
        attack: "proxy: connections that time out and stay half open",
        tries: `${CONNECTIONS}`,
        result: `${kept} descriptors kept; ${observedText(seen)}`,
        ok: kept < 50 && seen.wrong === 0,
      };
    },
  );
}

export function flood({ proxyUrl }: FloodTarget, signal: AbortSignal): Promise<void> {
  return untilAborted(signal, async () => {
    const sockets = await open(proxyUrl);
    await sleep(5_000, undefined, { signal }).catch(() => {});
    for (const socket of sockets) socket.destroy();
  });
}
