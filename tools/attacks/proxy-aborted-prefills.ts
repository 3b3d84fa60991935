import { setTimeout as sleep } from "node:timers/promises";
import type { AttackResult, FloodTarget } from "./support/attack.js";
import { attackProxy, observedText, postText, untilAborted } from "./support/attacked-proxy.js";
import { strangerAt } from "./support/stranger.js";

const CLIENTS = 4;

/** The default of `limits.abandonedPrefillMs`. */
const LIMIT_MS = 15_000;

/** One client that sends a request and leaves after at most `leaveMs`. */
async function round(url: string, leaveMs: number): Promise<void> {
  const socket = await strangerAt(url, postText('{"prompt":"slow","max_tokens":1}'));
  await sleep(Math.random() * leaveMs);
  socket.destroy();
}

/**
 * Four clients abort their requests in a loop, for 25 s: without a limit P would work for them all
 * the time.
 */
export async function run(): Promise<AttackResult> {
  let tries = 0;
  return await attackProxy(
    async ({ url }) => {
      const until = performance.now() + 25_000;
      const loops = Array.from({ length: CLIENTS }, async () => {
        for (; performance.now() < until; tries += 1) await round(url, 600);
      });
      await Promise.all(loops);
    },
    async (seen, proxy) => {
      const [ofAttack, workMs] = [await proxy.reached(seen), await proxy.slowMs()];
      return {
        attack: "proxy: clients that abort during prefill",
        tries: `${CLIENTS} clients, ${tries} requests in 25 s`,
        result: `${ofAttack} reached P, which worked for them in ${workMs} ms; ${observedText(seen)}`,
        // Four more may be under way when the limit is reached, and P hears later than the proxy
        // that a client has left.
        ok: seen.wrong === 0 && workMs <= LIMIT_MS + 3_000,
      };
    },
  );
}

export function flood({ proxyUrl }: FloodTarget, signal: AbortSignal): Promise<void> {
  return untilAborted(signal, () =>
    Promise.all(Array.from({ length: CLIENTS }, () => round(proxyUrl, 60))),
  );
}
