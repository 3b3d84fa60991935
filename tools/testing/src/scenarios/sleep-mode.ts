import type { ConnectorModule } from "@kv/interface";
import { describe, expect, it } from "vitest";
import { createScenario, prompt } from "./scenario.js";

/** As in vLLM's sleep mode, an engine takes its caches back, and registers them again. */
export function itSleepsAndWakes(connector: ConnectorModule, operation: "READ" | "WRITE"): void {
  describe.each(["p", "d"] as const)("sleep mode of %s", (sleeper) => {
    it.each([1, 2])(
      "ends requests in flight with a code and frees their blocks; awake, it serves at once; P's TP %i",
      async (tpSize) => {
        const play = createScenario({
          connector,
          faults: [{ fault: "delay", operation, delayMs: 300, where: () => isSlow }],
        });
        let isSlow = false;
        const p = await play.engine("p", { tpSize });
        const d = await play.engine("d");
        const engine = { p, d }[sleeper];
        await play.serves(p, d, 1);
        const kept = await play.prefilled(p, 2);
        const params = await play.prefilled(p, 3);
        isSlow = true;
        const inFlight = d.decode({ ...prompt(3), params });
        inFlight.catch(() => {});
        await play.clock.advance(50);
        await play.clock.settle(engine.sleep());
        isSlow = false;
        expect(engine.outstanding().blocks).toBe(0);
        const code = await play.outcome(inFlight);
        if (sleeper === "d") expect(code).toBe("KV_MEMORY_NOT_REGISTERED");
        else expect(code).toMatch(/^KV_/);
        await play.clock.advance(100);
        await play.clock.settle(engine.wakeUp());
        // P's blocks of before its sleep hold nothing any more.
        const before = await play.outcome(d.decode({ ...prompt(2), params: kept }));
        if (sleeper === "d") expect(before).toBe("ok");
        else expect(before).toMatch(/^KV_/);
        await play.serves(p, d, 4);
        await play.serves(p, d, 5);
      },
    );
  });
  it.each(["p", "d"] as const)(
    "the first request after a long sleep of %s is served",
    async (sleeper) => {
      const play = createScenario({ connector });
      const { p, d } = await play.pair();
      const engine = { p, d }[sleeper];
      await play.serves(p, d, 1);
      await play.clock.settle(engine.sleep());
      await play.clock.advance(60_000);
      await play.clock.settle(engine.wakeUp());
      await play.serves(p, d, 2);
    },
  );

  it("a prompt whose last step was P's last before the sleep is lost: no D gets it, and its blocks are free", async () => {
    const play = createScenario({ connector });
    const { p, d } = await play.pair();
    const params = await play.prefilled(p, 1);
    await play.clock.settle(p.sleep());
    await play.clock.settle(p.wakeUp());
    expect(await play.outcome(d.decode({ ...prompt(1), params }))).toMatch(/^KV_/);
    expect(p.outstanding().blocks).toBe(0);
  });
}
