import { pouredFrames } from "./support/poured-frames.js";

const MESSAGE = Buffer.alloc(400_000, Buffer.from([1, 0]));
MESSAGE[MESSAGE.length - 2] = 0;

export const { run, flood } = pouredFrames(
  "side channel: messages of 200,000 empty frames",
  MESSAGE,
  209 * 2 ** 20,
  15_000,
);
