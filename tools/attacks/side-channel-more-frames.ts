import { pouredFrames } from "./support/poured-frames.js";

/** Frames of 4,000 bytes, each with MORE: a message without end, 2 GiB of it. */
const FRAMES = Buffer.alloc(16 * 4009);
for (let at = 0; at < FRAMES.length; at += 4009) FRAMES.set([3, 0, 0, 0, 0, 0, 0, 0x0f, 0xa0], at);

export const { run, flood } = pouredFrames(
  "side channel: frames with MORE without end",
  FRAMES,
  2 ** 31,
);
