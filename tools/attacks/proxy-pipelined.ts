import { setTimeout as sleep } from "node:timers/promises";
import type { AttackResult, FloodTarget } from "./support/attack.js";
import { attackProxy, observedText, postText, untilAborted } from "./support/attacked-proxy.js";
import { strangerAt } from "./support/stranger.js";

const REQUESTS = 30_000;

async function round(url: string): Promise<void> {
  const socket = await strangerAt(
    url,
    postText('{"prompt":"slow","max_tokens":1}').repeat(REQUESTS),
  );
  socket.resume();
  await sleep(3_000);
  socket.destroy();
}

/** Sends 30,000 requests ahead on one connection. */
export const run = (): Promise<AttackResult> =>
  attackProxy(
    async ({ url }) => {
      for (let at = 0; at < 3; at += 1) await round(url);
    },
    async (seen, proxy) => {
      const ofAttack = await proxy.reached(seen);
      return {
        attack: "proxy: pipelined requests on one connection",
        tries: `3 times ${REQUESTS}`,
        result: `${ofAttack} reached P; ${observedText(seen)}`,
        ok: seen.wrong === 0 && ofAttack <= 3 && seen.mostDescriptors < 200,
      };
    },
  );

export function flood({ proxyUrl }: FloodTarget, signal: AbortSignal): Promise<void> {
  return untilAborted(signal, () => round(proxyUrl));
}
