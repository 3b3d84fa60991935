import type { Agent, Clock } from "@kv/interface";
import type { FaultEngine } from "@kv/testing/faults/fault-fixture";

const CHECK_INTERVAL_MS = 50;
const MAX_CHECKS = 800;

/** After many checks the run reports what is still held. */
export async function untilNothingHeld(
  engines: readonly FaultEngine[],
  clock: Clock,
): Promise<void> {
  // While the machine stalls, no engine can release anything.
  for (let checks = 0; checks < MAX_CHECKS; checks += 1) {
    const held = await Promise.all(engines.map((engine) => engine.outstanding()));
    if (held.flatMap(Object.values).every((count) => count === 0)) return;
    await new Promise<void>((resolve) => void clock.setTimer(resolve, CHECK_INTERVAL_MS));
  }
}

export function heldBy(agents: readonly Pick<Agent, "telemetry">[]) {
  const held = { transfers: 0, registrations: 0 };
  for (const agent of agents) {
    const { transfersInFlight, registrations } = agent.telemetry();
    held.transfers += transfersInFlight;
    held.registrations += registrations;
  }
  return held;
}
