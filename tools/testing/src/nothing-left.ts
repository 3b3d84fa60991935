import { expect, onTestFinished } from "vitest";

type Counts = Readonly<Record<string, number>>;

/** The counts that are not zero. */
export const held = (counts: Counts): Counts =>
  Object.fromEntries(Object.entries(counts).filter(([, count]) => count !== 0));

/**
 * The test then ends by looking for what is left: timers, bytes, generations, registrations,
 * queues, references, listeners and blocks. `end` closes what runs, or lets its time pass.
 */
export function leavesNothing(
  look: () => Counts,
  end: () => Promise<void> | void = () => {},
): void {
  onTestFinished(async () => {
    await end();
    expect(held(look()), "what the test leaves").toEqual({});
  });
}
