import { systemClock } from "@kv/interface";
import type { FaultFixture } from "@kv/testing/faults/fault-fixture";
import { type EngineChild, startEngineChild } from "./engine-child.js";
import { untilNothingHeld } from "./real-time.js";

/** Runs each engine in its own process, with NIXL over UCX and ZMQ between them, in real time. An engine dies by SIGKILL. */
export function processGround(options: {
  readonly connector: "pull" | "push";
  readonly seed: string;
}): FaultFixture {
  const clock = systemClock();
  const children: EngineChild[] = [];
  /** A restarted engine listens on its predecessor's port, so that peers notice the restart. */
  const ports = new Map<string, number>();
  const counts: Record<string, number> = {};
  return {
    clock,
    async start({ connector: _, violation, ...engineOptions }) {
      const seed = `${options.seed} ${engineOptions.hostName} ${children.length}`;
      const sideChannelPort = ports.get(engineOptions.hostName) ?? 0;
      const { connector } = options;
      const child = await startEngineChild({ ...engineOptions, connector, seed, sideChannelPort }, violation);
      ports.set(engineOptions.hostName, child.address.port);
      children.push(child);
      return child;
    },
    see: (work) => work,
    async rest(engines) {
      const living = children.filter((child) => engines.includes(child));
      for (const child of living) {
        child.calm();
        for (const [kind, count] of Object.entries(await child.counts()))
          counts[kind] = (counts[kind] ?? 0) + count;
      }
      await untilNothingHeld(engines, clock);
    },
    async end() {
      const held = { transfers: 0, registrations: 0 };
      for (const child of children) {
        held.transfers += child.left()?.transfers ?? 0;
        held.registrations += child.left()?.registrations ?? 0;
      }
      return held;
    },
    faultCounts: () => counts,
  };
}
