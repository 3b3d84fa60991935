import { expect, test } from "vitest";
import { seededRandom } from "../index.js";

test("the same seed gives the same numbers, another seed gives others, and a fork does not change its parent's numbers", () => {
  const take = (seed: number | string): number[] => {
    const random = seededRandom(seed);
    return Array.from({ length: 20 }, () => random.next());
  };
  expect(take(1)).toEqual(take(1));
  expect(take(1)).not.toEqual(take(2));
  const random = seededRandom(1);
  random.fork("faults").next();
  expect(Array.from({ length: 20 }, () => random.next())).toEqual(take(1));
  expect(seededRandom(1).fork("a").next()).not.toBe(seededRandom(1).fork("b").next());
});

test("numbers are uniform in [0, 1) and ids have the form of UUID version 4", () => {
  const random = seededRandom("spread");
  const buckets = new Array<number>(10).fill(0);
  for (let draw = 0; draw < 100_000; draw++) {
    const value = random.next();
    if (!(value >= 0 && value < 1)) expect.fail(`drew ${value}`);
    buckets[Math.floor(value * 10)] = (buckets[Math.floor(value * 10)] ?? 0) + 1;
  }
  for (const bucket of buckets) expect(Math.abs(bucket - 10_000)).toBeLessThan(500);
  const ids = new Set(Array.from({ length: 1000 }, () => random.uuid()));
  expect(ids.size).toBe(1000);
  for (const id of ids)
    expect(id).toMatch(/^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/);
});
