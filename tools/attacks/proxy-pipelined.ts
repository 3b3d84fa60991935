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

const REQUESTS = 30_000;

async function round(url: string): Promise<void> {
  const socket = await attacker(url, postText('{"prompt":"slow","max_tokens":1}').repeat(REQUESTS));
  socket.resume();
  await sleep(3_000);
  socket.destroy();
}

/** Sends 30,000 requests ahead on one connection. */
export async function run(): Promise<AttackResult> {
  const proxy = await startProxy();
  try {
    const observed = await observe(proxy, async () => {
      for (let at = 0; at < 3; at += 1) await round(proxy.url);
    });
    const { requests } = await proxy.counts();
    const ofAttack = requests - observed.right - observed.wrong - 20;
    return {
      attack: "proxy: pipelined requests on one connection",
      tries: `3 times ${REQUESTS}`,
      result: `${ofAttack} reached P; ${observedText(observed)}`,
      ok: observed.wrong === 0 && ofAttack <= 3 && observed.mostDescriptors < 200,
    };
  } finally {
    proxy.close();
  }
}

export function flood({ proxyUrl }: FloodTarget, signal: AbortSignal): Promise<void> {
  return untilAborted(signal, () => round(proxyUrl));
}

await runAsScript(import.meta.url, run);
