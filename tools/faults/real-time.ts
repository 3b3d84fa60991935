import type { Clock } from "@kv/interface";
import type { FaultTimes } from "@kv/testing/faults/fault-client";
import type { FaultEngine } from "@kv/testing/faults/fault-fixture";

/**
 * Short, so that what is lost is soon given up. A deadline has far more time than it needs, for a machine that stops now and then: who waits
 * for ever is found out all the same.
 */
export const REAL_TIMES: FaultTimes = {
  leaseMs: 4000,
  requestTimeoutMs: 5000,
  deadlineMs: 120_000,
  longMs: 5000,
};

const LOOK_EVERY_MS = 50;
const MOST_LOOKS = 800;

/** Until the engines hold nothing; what they hold after so many looks they hold for ever, and the run says so. */
export async function untilNothingHeld(engines: readonly FaultEngine[], clock: Clock): Promise<void> {
  // Looks are counted, not time: while the machine stands still nobody can let go of anything.
  for (let looks = 0; looks < MOST_LOOKS; looks++) {
    const held = await Promise.all(engines.map((engine) => engine.outstanding()));
    if (held.every((each) => Object.values(each).every((count) => count === 0))) return;
    await new Promise<void>((resolve) => void clock.setTimer(resolve, LOOK_EVERY_MS));
  }
}

/** What agents hold, as `outstanding()` names it; of closed ones nothing may be left at all. */
export function heldBy(
  agents: readonly { telemetry(): { transfersInFlight: number; registrations: number } }[],
): { transfers: number; registrations: number } {
  const sum = (count: (of: ReturnType<(typeof agents)[number]["telemetry"]>) => number) =>
    agents.reduce((total, agent) => total + count(agent.telemetry()), 0);
  return {
    transfers: sum(({ transfersInFlight }) => transfersInFlight),
    registrations: sum(({ registrations }) => registrations),
  };
}
