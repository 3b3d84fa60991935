import type { Clock } from "@kv/interface";
import type { FaultEngine } from "@kv/testing/faults/fault-fixture";

const CHECK_INTERVAL_MS = 50;
const MAX_CHECKS = 800;

/**
 * Waits until the engines hold nothing. It gives up after a limited number of checks; the run then
 * reports what is still held.
 */
export async function untilNothingHeld(
  engines: readonly FaultEngine[],
  clock: Clock,
): Promise<void> {
  // Counts checks instead of time: while the machine stalls, no engine can release anything.
  for (let checks = 0; checks < MAX_CHECKS; checks++) {
    const held = await Promise.all(engines.map((engine) => engine.outstanding()));
    if (held.every((each) => Object.values(each).every((count) => count === 0))) return;
    await new Promise<void>((resolve) => void clock.setTimer(resolve, CHECK_INTERVAL_MS));
  }
}

/** Counts the transfers and registrations that the agents hold. Closed agents must hold none. */
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
