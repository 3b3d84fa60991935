import { createPairScheduler, type PairScheduler } from "@kv/connector";
import type { SchedulerOptions } from "@kv/interface";
import { createDecodeScheduler } from "./decode-scheduler.js";
import { PUSH } from "./step-metadata.js";

/** The scheduler side of push: both halves, for an engine is a producer or a consumer by what each request asks. */
export type PushScheduler = PairScheduler;

export function createPushScheduler(options: SchedulerOptions): PushScheduler {
  return createPairScheduler(options, {
    name: PUSH,
    transferMode: "push",
    createDecode: ({ clock, address }) =>
      createDecodeScheduler({ clock, config: options.cache, sideChannel: address }),
  });
}
