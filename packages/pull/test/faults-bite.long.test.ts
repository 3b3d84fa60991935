// A long suite: whether the fault runs notice planted faults.
import { faultRun } from "@kv/testing/faults/fault-run";
import { describe, expect, it } from "vitest";

// A fault run that detects nothing proves nothing. Each test breaks a rule from outside, and the
// run must report violations.
describe("the fault run detects", () => {
  it.each(["release-early", "trust-stale"] as const)(
    "%s",
    async (sabotage) => {
      const report = await faultRun({ seed: "bite", requests: 2000, sabotage });
      expect(report.violationCount).toBeGreaterThan(0);
    },
    300_000,
  );

  it("wrong-clock, with producers that speak only vLLM's protocol", async () => {
    const report = await faultRun({
      seed: "bite",
      requests: 2000,
      plainProducers: true,
      sabotage: "wrong-clock",
    });
    expect(report.violationCount).toBeGreaterThan(0);
  }, 300_000);
});
