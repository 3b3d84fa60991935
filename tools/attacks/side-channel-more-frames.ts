import type { AttackResult, FloodTarget } from "./support/attack.js";
import { attackListener, describeObserved, withstood } from "./support/attacked-side-channel.js";
import { pour } from "./support/zmtp-peer.js";

/** Frames of 4,000 bytes, each with MORE. */
const FRAMES = Buffer.alloc(16 * 4009);
for (let at = 0; at < FRAMES.length; at += 4009) FRAMES.set([3, 0, 0, 0, 0, 0, 0, 0x0f, 0xa0], at);
const TOTAL_BYTES = 2 ** 31;

/** A message of frames without end, 2 GiB of them: on one connection, or on as many as it takes. */
export async function run(): Promise<AttackResult> {
  let sent = 0;
  let connections = 0;
  const seen = await attackListener(async (target, signal) => {
    const endMs = performance.now() + 20_000;
    while (sent < TOTAL_BYTES && performance.now() < endMs && !signal.aborted) {
      connections += 1;
      sent += await pour(target, FRAMES, TOTAL_BYTES - sent, signal);
    }
  });
  return {
    attack: "side channel: frames with MORE without end",
    tries: `${Math.round(sent / 2 ** 20)} MiB on ${connections} connections`,
    result: describeObserved(seen),
    ok: withstood(seen),
  };
}

/** The same against a running demo. */
export async function flood({ sideChannel }: FloodTarget, signal: AbortSignal): Promise<void> {
  while (!signal.aborted) await pour(sideChannel, FRAMES, TOTAL_BYTES, signal);
}
