import fc from "fast-check";
import { expect, test } from "vitest";
import { TurnDigests } from "./turn-digests.js";

const IDS = Array.from({ length: 700 }, (_, at) => (at * 7919) % 50_000);

test("a begin of a conversation has the digest of the same ids alone, at each length", () => {
  const all = new TurnDigests(["m"], IDS);
  for (const length of [1, 255, 256, 257, 511, 512, 699, 700]) {
    const begin = new TurnDigests(["m"], IDS.slice(0, length));
    expect(begin.of(length)).toBe(all.of(length));
    expect(begin.chunks).toEqual(all.chunks.slice(0, begin.chunks.length));
    expect(all.chunks).toContain(begin.chunkOf(length));
  }
  expect(new Set(Array.from({ length: 700 }, (_, at) => all.of(at + 1))).size).toBe(700);
});

test("another scope, another length or one other id gives another digest", () => {
  const all = new TurnDigests(["m", null], IDS);
  fc.assert(
    fc.property(
      fc.integer({ min: 1, max: 700 }),
      fc.nat(699),
      fc.integer({ min: 1, max: 9 }),
      (length, at, more) => {
        const other = IDS.map((id, index) => (index === at % length ? id + more : id));
        expect(new TurnDigests(["m", null], other).of(length)).not.toBe(all.of(length));
        expect(new TurnDigests(["m", "salt"], IDS).of(length)).not.toBe(all.of(length));
      },
    ),
    { numRuns: 100 },
  );
});
