import type { AttackResult, FloodTarget } from "./support/attack.js";
import { attackListener, describeObserved, withstood } from "./support/attacked-side-channel.js";
import { pour } from "./support/zmtp-peer.js";

/** A message of 200,000 empty frames. */
const MESSAGE = Buffer.alloc(400_000, Buffer.from([1, 0]));
MESSAGE[MESSAGE.length - 2] = 0;
const TOTAL_BYTES = 209 * 2 ** 20;

/** Messages of 200,000 empty frames each. */
export async function run(): Promise<AttackResult> {
  let sent = 0;
  let connections = 0;
  const seen = await attackListener(async (target, signal) => {
    const endMs = performance.now() + 20_000;
    while (sent < TOTAL_BYTES && performance.now() < endMs && !signal.aborted) {
      connections += 1;
      sent += await pour(target, MESSAGE, TOTAL_BYTES - sent, signal);
    }
    // What was received may still be worked on.
    await new Promise((resolve) => setTimeout(resolve, 15_000));
  });
  return {
    attack: "side channel: messages of 200,000 empty frames",
    tries: `${Math.round(sent / 2 ** 20)} MiB on ${connections} connections`,
    result: describeObserved(seen),
    ok: withstood(seen),
  };
}

/** The same against a running demo. */
export async function flood({ sideChannel }: FloodTarget, signal: AbortSignal): Promise<void> {
  while (!signal.aborted) await pour(sideChannel, MESSAGE, TOTAL_BYTES, signal);
}
