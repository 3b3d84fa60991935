import { KvError } from "@kv/interface";
import fc from "fast-check";
import { expect } from "vitest";

/**
 * One of the messages with one to four changes: a byte flipped, bytes removed, a byte inserted, or
 * the end cut off.
 */
export const damaged = (...sound: readonly Uint8Array[]): fc.Arbitrary<Uint8Array> =>
  fc
    .tuple(
      fc.constantFrom(...sound),
      fc.array(
        fc.tuple(fc.constantFrom("flip", "cut", "insert", "end"), fc.nat(10_000), fc.nat(255)),
        { minLength: 1, maxLength: 4 },
      ),
    )
    .map(([bytes, changes]) => {
      let now = [...bytes];
      for (const [how, at, byte] of changes) {
        const place = at % Math.max(1, now.length);
        if (how === "flip") now[place] = (now[place] ?? 0) ^ (byte || 1);
        else if (how === "cut") now.splice(place, 1 + (byte % 16));
        else if (how === "insert") now.splice(place, 0, byte);
        else now = now.slice(0, place);
      }
      return Uint8Array.from(now);
    });

/** Requires that a call ends well or with a KvError. */
export function endsWell(act: () => unknown): void {
  try {
    act();
  } catch (error) {
    expect(KvError.is(error), String(error)).toBe(true);
  }
}
