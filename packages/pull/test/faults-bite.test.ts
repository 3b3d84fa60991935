import { faultRun } from "@kv/testing/faults/fault-run";
import { describe, expect, it } from "vitest";

// What finds nothing proves nothing: each rule is broken from outside, and the run must see it.
describe("the fault run finds", () => {
  it.each(["release-early", "trust-stale"] as const)(
    "%s",
    async (sabotage) => {
      const report = await faultRun({ seed: "bite", requests: 2000, sabotage });
      expect(report.violationCount).toBeGreaterThan(0);
    },
    300_000,
  );

  it("a lease that seems not to end, where time alone tells", async () => {
    const report = await faultRun({
      seed: "bite",
      requests: 2000,
      plainProducers: true,
      sabotage: "wrong-clock",
    });
    expect(report.violationCount).toBeGreaterThan(0);
  }, 300_000);
});
