import { setTimeout as sleep } from "node:timers/promises";
import type { AttackResult, FloodTarget } from "./support/attack.js";
import { attackProxy, observedText, postText, untilAborted } from "./support/attacked-proxy.js";
import { strangerAt } from "./support/stranger.js";

const CLIENTS = 4;

/** One client that sends a request and leaves after 0 to 60 ms. */
async function round(url: string): Promise<void> {
  const socket = await strangerAt(url, postText('{"prompt":"slow","max_tokens":1}'));
  await sleep(Math.random() * 60);
  socket.destroy();
}

/** Four clients abort their requests in a loop, for 25 s. */
export async function run(): Promise<AttackResult> {
  let tries = 0;
  return await attackProxy(
    async ({ url }) => {
      const until = performance.now() + 25_000;
      const loops = Array.from({ length: CLIENTS }, async () => {
        for (; performance.now() < until; tries += 1) await round(url);
      });
      await Promise.all(loops);
    },
    async (seen, proxy) => {
      const ofAttack = await proxy.reached(seen);
      return {
        attack: "proxy: clients that abort during prefill",
        tries: `${CLIENTS} clients, ${tries} requests in 25 s`,
        result: `${ofAttack} reached P; ${observedText(seen)}`,
        // Four more may be under way when the limit of 30 is reached.
        ok: seen.wrong === 0 && ofAttack <= 30 + CLIENTS,
      };
    },
  );
}

export function flood({ proxyUrl }: FloodTarget, signal: AbortSignal): Promise<void> {
  return untilAborted(signal, () => Promise.all(Array.from({ length: CLIENTS }, () => round(proxyUrl))));
}
