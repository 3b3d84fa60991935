import { systemClock } from "@kv/interface";
import type { FaultFixture } from "@kv/testing/faults/fault-fixture";
import { type EngineChild, startEngineChild } from "./engine-child.js";
import { untilNothingHeld } from "./held-resources.js";

/**
 * Runs each engine in its own process, with NIXL over UCX and ZMQ between them, with the real
 * clock. Engines are killed with SIGKILL.
 */
export function multiProcessFixture(options: {
  readonly connector: "pull" | "push";
  readonly seed: string;
  /** Whether operations fail, besides the deaths of engines. Default: true. */
  readonly faults?: boolean;
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
      const child = await startEngineChild(
        { ...engineOptions, connector, seed, sideChannelPort },
        violation,
      );
      if (options.faults === false) child.stopFaults();
      ports.set(engineOptions.hostName, child.address.port);
      children.push(child);
      return child;
    },
    settle: (work) => work,
    async waitUntilIdle(engines) {
      const living = children.filter((child) => engines.includes(child));
      for (const child of living) {
        child.stopFaults();
        for (const [kind, count] of Object.entries(await child.counts()))
          counts[kind] = (counts[kind] ?? 0) + count;
      }
      await untilNothingHeld(engines, clock);
    },
    async countHeld() {
      const held = { transfers: 0, registrations: 0 };
      for (const child of children) {
        held.transfers += child.heldAfterClose()?.transfers ?? 0;
        held.registrations += child.heldAfterClose()?.registrations ?? 0;
      }
      return held;
    },
    faultCounts: () => counts,
  };
}
