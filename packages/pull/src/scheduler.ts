import { createPairScheduler, type PairScheduler } from "@kv/connector";
import type { SchedulerOptions } from "@kv/interface";
import { createDecodeScheduler } from "./decode-scheduler.js";
import { PULL } from "./step-metadata.js";

/** The scheduler side of pull: both halves, for an engine is a producer or a consumer by what each request asks. */
export type PullScheduler = PairScheduler;

export function createPullScheduler(options: SchedulerOptions): PullScheduler {
  return createPairScheduler(options, {
    name: PULL,
    transferMode: "pull",
    createDecode: ({ clock }) => createDecodeScheduler({ clock, config: options.cache }),
  });
}
