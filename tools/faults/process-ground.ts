import { systemClock } from "@kv/interface";
import type { FaultFixture } from "@kv/testing/faults/fault-fixture";
import { type EngineChild, startEngineChild } from "./engine-child.js";
import { untilNothingHeld } from "./real-time.js";

/** NIXL with UCX, each engine a process, ZMQ between them, in real time: an engine that dies is a process that is killed. */
export function processGround(options: {
  readonly connector: "pull" | "push";
  readonly seed: string;
}): FaultFixture {
  const clock = systemClock();
  const children: EngineChild[] = [];
  /** A restarted engine answers where the one before it did: so others learn that it is gone. */
  const ports = new Map<string, number>();
  const counts: Record<string, number> = {};
  return {
    clock,
    async start({ connector: _, violation, ...order }) {
      const seed = `${options.seed} ${order.hostName} ${children.length}`;
      const sideChannelPort = ports.get(order.hostName) ?? 0;
      const { connector } = options;
      const child = await startEngineChild({ ...order, connector, seed, sideChannelPort }, violation);
      ports.set(order.hostName, child.address.port);
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
