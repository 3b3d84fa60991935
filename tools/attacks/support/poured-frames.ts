import { setTimeout as sleep } from "node:timers/promises";
import type { AttackModule } from "./attack.js";
import { attackListener, describeObserved, withstood } from "./attacked-side-channel.js";
import { pour } from "./zmtp-peer.js";

/**
 * Frames that are sent again and again, on one connection or on as many as it takes, for 20 s at
 * most. `restMs`: what was received may still be worked on.
 */
export function pouredFrames(
  attack: string,
  frames: Buffer,
  totalBytes: number,
  restMs = 0,
): Required<AttackModule> {
  return {
    async run() {
      let sent = 0;
      let connections = 0;
      const seen = await attackListener(async (target, signal) => {
        const endMs = performance.now() + 20_000;
        while (sent < totalBytes && performance.now() < endMs && !signal.aborted) {
          connections += 1;
          sent += await pour(target, frames, totalBytes - sent, signal);
        }
        await sleep(restMs);
      });
      const tries = `${Math.round(sent / 2 ** 20)} MiB on ${connections} connections`;
      return { attack, tries, result: describeObserved(seen), ok: withstood(seen) };
    },
    async flood({ sideChannel }, signal) {
      while (!signal.aborted) await pour(sideChannel, frames, totalBytes, signal);
    },
  };
}
