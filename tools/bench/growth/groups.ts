import type { Group } from "./quantity.js";

/** Loads one group. Each is measured in a process of its own, which loads no other. */
export const GROUPS: Readonly<Record<string, () => Promise<Group>>> = {
  scheduler: async () => (await import("./groups/scheduler.js")).scheduler,
  worker: async () => (await import("./groups/worker.js")).worker,
  plan: async () => (await import("./groups/plan.js")).plan,
  "reference-engine": async () => (await import("./groups/reference-engine.js")).referenceEngine,
  nixl: async () => (await import("./groups/nixl.js")).nixl,
  proxy: async () => (await import("./groups/proxy.js")).proxy,
  fleet: async () => (await import("./groups/fleet.js")).fleet,
};
