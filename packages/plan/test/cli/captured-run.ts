import { expect } from "vitest";
import type { PairReport, PlanReport } from "../../src/cli/report/report.js";
import { runKvPlan } from "../../src/cli/run.js";

/** `kv-plan` in this process, with what it printed. */
export async function captured(...args: string[]): Promise<{ code: number; stdout: string; stderr: string }> {
  let [stdout, stderr] = ["", ""];
  const code = await runKvPlan(args, {
    stdout: (text) => {
      stdout += text;
    },
    stderr: (text) => {
      stderr += text;
    },
  });
  return { code, stdout, stderr };
}

/** What `--json` prints. */
export async function report(...args: string[]): Promise<PairReport> {
  const { stdout, stderr } = await captured(...args, "--json");
  expect(stderr).toBe("");
  return JSON.parse(stdout) as PairReport;
}

/** The report of a pair that has a plan, which is proven. */
export async function planned(...args: string[]): Promise<PlanReport> {
  const found = await report(...args);
  if (found.outcome !== "planned") return expect.fail(found.reason);
  expect(found.proof).toMatchObject({ proven: true });
  return found;
}
