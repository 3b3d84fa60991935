import fc from "fast-check";
import { describe, expect, it } from "vitest";
import type { Instance } from "../instances/instance.js";
import { prefixAware } from "./prefix-aware.js";
import { LeastLoaded, leastLoad, type Routing, roundRobin } from "./routing.js";
import { sessionAffinity } from "./session-affinity.js";

class Counted implements Instance {
  static reads = 0;
  readonly role = "prefill";
  load = 0;

  constructor(readonly url: string) {}

  get inFlight(): number {
    Counted.reads += 1;
    return this.load;
  }
}

const many = (count: number) =>
  Array.from({ length: count }, (_, at) => new Counted(`http://i${at}`));

describe("the order by load", () => {
  it("gives an instance with the fewest requests in flight, and takes equal ones in turn, after any changes", () => {
    const step = fc.record({ at: fc.nat(9), load: fc.nat(4), choose: fc.boolean() });
    fc.assert(
      fc.property(fc.array(step, { maxLength: 60 }), (steps) => {
        const instances = many(10);
        const byLoad = new LeastLoaded();
        for (const { at, load, choose } of steps) {
          const changed = instances[at];
          if (changed === undefined) continue;
          changed.load = load;
          byLoad.loadChanged(changed);
          const fewest = Math.min(...instances.map((one) => one.load));
          expect(byLoad.fewest(instances)).toBe(fewest);
          const inOrder = [...byLoad.inOrder(instances)];
          expect(inOrder.map(({ inFlight }) => inFlight)).toEqual(
            instances.map((one) => one.load).sort(),
          );
          if (!choose) continue;
          const chosen = byLoad.choose(instances);
          expect(chosen?.inFlight).toBe(fewest);
          const next = byLoad.choose(instances);
          expect(next?.inFlight).toBe(fewest);
          expect(next === chosen).toBe(instances.filter((one) => one.load === fewest).length === 1);
        }
      }),
    );
  });

  it("finds holders by their load, and only those that are candidates and are not too busy", () => {
    const instances = many(200);
    for (const [at, one] of instances.entries()) one.load = at % 10;
    const byLoad = new LeastLoaded();
    for (const one of instances) byLoad.loadChanged(one);
    const loads = (holders: readonly Instance[], most: number) =>
      byLoad.holders(instances, new Set(holders), most, 3).map(({ inFlight }) => inFlight);
    for (let round = 0; round < 3; round += 1) {
      expect(loads(instances, 8)).toEqual([0, 0, 0]);
      expect(loads(instances.slice(5, 10), 8)).toEqual([5, 6, 7]);
      expect(loads(instances.slice(5, 10), 4)).toEqual([]);
      expect(loads(many(5), 8)).toEqual([]);
      // None of these 80 is among the least loaded.
      const busy = instances.filter(({ load }) => load >= 6);
      expect(loads(busy, 8)).toEqual([6, 6, 6]);
    }
  });

  const strategies: readonly (readonly [string, () => Routing])[] = [
    ["round-robin", roundRobin],
    ["least-load", leastLoad],
    ["session-affinity", sessionAffinity],
    ["prefix-aware", prefixAware],
  ];
  it.each(strategies)("%s looks at as many instances of 2,048 as of 256", (_, create) => {
    const reads = [256, 2048].map((count) => {
      const instances = many(count);
      const routing = create();
      routing.instancesChanged?.(instances);
      const context = (at: number) => ({
        requestId: `${at}`,
        request: {
          fields: { prompt: "system prompt ".repeat(40) + at, user: at % 2 === 0 ? "u" : "" },
        },
      });
      const turn = (at: number) => {
        const chosen = routing.choose(instances, context(at)) as Counted;
        chosen.load += 1;
        routing.loadChanged?.(chosen);
        // Half of the visits end.
        const ended = at % 2 === 0 ? chosen : undefined;
        if (ended !== undefined) ended.load -= 1;
        if (ended !== undefined) routing.loadChanged?.(ended);
      };
      // Each instance has held the prompt.
      for (let at = 0; at < count; at += 1) turn(at);
      Counted.reads = 0;
      for (let at = 0; at < 500; at += 1) turn(at);
      return Counted.reads / 500;
    });
    expect(Math.max(...reads)).toBeLessThan(200);
  });
});
