// A long suite: whether the fault runs notice planted faults.
import { PUSH_FAULT_RULES } from "@kv/testing/faults/fault-rules";
import { faultRun } from "@kv/testing/faults/fault-run";
import { describe, expect, it } from "vitest";
import { pushConnector } from "../src/index.js";
import { sabotagedPush } from "./sabotage.js";

// A fault run that detects nothing proves nothing. Each test breaks a rule of push from outside,
// and the run must report violations.
describe("the fault run detects", () => {
  it.each([
    ["believe-itself", 600],
    ["no-generations", 3000],
    ["release-early", 2000],
  ] as const)(
    "%s",
    async (sabotage, requests) => {
      const report = await faultRun({
        seed: "bite",
        requests,
        connector: pushConnector,
        rules: [{ fault: "fail", operation: "WRITE", probability: 0.1 }, ...PUSH_FAULT_RULES],
        atOnce: 0.6,
        numBlocks: 192,
        wrapTransport: sabotagedPush(sabotage),
      });
      expect(report.violations.join("\n")).toMatch(/wrong bytes|written to while nobody had it/);
    },
    300_000,
  );
});
