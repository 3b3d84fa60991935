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

const CLIENTS = 4;

/** One client that sends a request and leaves after 0 to 60 ms. */
async function round(url: string): Promise<void> {
  const socket = await attacker(url, postText('{"prompt":"slow","max_tokens":1}'));
  await sleep(Math.random() * 60);
  socket.destroy();
}

/** Four clients abort their requests in a loop, for 25 s. */
export async function run(): Promise<AttackResult> {
  const proxy = await startProxy();
  try {
    const until = performance.now() + 25_000;
    let tries = 0;
    const observed = await observe(proxy, async () => {
      const loops = Array.from({ length: CLIENTS }, async () => {
        while (performance.now() < until) {
          tries += 1;
          await round(proxy.url);
        }
      });
      await Promise.all(loops);
    });
    const { requests } = await proxy.counts();
    const ofAttack = requests - observed.right - observed.wrong - 20;
    return {
      attack: "proxy: clients that abort during prefill",
      tries: `${CLIENTS} clients, ${tries} requests in 25 s`,
      result: `${ofAttack} reached P; ${observedText(observed)}`,
      // Four more may be under way when the limit of 30 is reached.
      ok: observed.wrong === 0 && ofAttack <= 30 + CLIENTS,
    };
  } finally {
    proxy.close();
  }
}

export function flood({ proxyUrl }: FloodTarget, signal: AbortSignal): Promise<void> {
  return untilAborted(signal, async () => {
    await Promise.all(Array.from({ length: CLIENTS }, () => round(proxyUrl)));
  });
}

await runAsScript(import.meta.url, run);
