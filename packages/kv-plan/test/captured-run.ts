import { expect } from "vitest";
import type { PairReport, PlanReport } from "../src/report/report.js";
import { runKvPlan } from "../src/run.js";

/** Runs `kv-plan` in this process and returns its output. Each of `args` is one or more words. */
export async function captured(
  ...args: string[]
): Promise<{ code: number; stdout: string; stderr: string }> {
  let [stdout, stderr] = ["", ""];
  const code = await runKvPlan(
    args.flatMap((words) => words.split(" ")),
    {
      stdout: (text) => {
        stdout += text;
      },
      stderr: (text) => {
        stderr += text;
      },
    },
  );
  return { code, stdout, stderr };
}

/** The parsed `--json` report. */
export async function report(...args: string[]): Promise<PairReport> {
  const { stdout, stderr } = await captured(...args, "--json");
  expect(stderr).toBe("");
  return JSON.parse(stdout) as PairReport;
}

/** The report of a pair with a proven plan. */
export async function planned(...args: string[]): Promise<PlanReport> {
  const found = await report(...args);
  if (found.outcome !== "planned") return expect.fail(found.reason);
  expect(found.proof).toMatchObject({ proven: true });
  return found;
}
