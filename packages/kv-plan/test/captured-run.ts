import { writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { EXIT_CODES } from "@kv/program";
import { expect } from "vitest";
import type { PairReport, PlanReport, RefusalReport } from "../src/report/report.js";
import { runKvPlan } from "../src/run.js";

/** The path of a model's config. */
export const model = (name: string): string =>
  fileURLToPath(new URL(`../models/${name}.json`, import.meta.url));

/** A region of an engine that a file describes. */
export const region = (tpSize: number, change: object = {}) => ({
  name: "layer.0",
  numBlocks: 500,
  blockLengthBytes: 4096 / tpSize,
  ...change,
});
export const engine = (tpSize: number, change: object = {}) => ({
  tpSize,
  kernelBlockSize: 16,
  attentionBackend: "FLASH_ATTN",
  regions: [region(tpSize)],
  ...change,
});
/** What such a file has of a pair of engines. */
export const PAIR = {
  version: 1,
  title: "two small engines",
  numKvHeads: 4,
  groups: ["full"],
  prefill: engine(2),
  decode: engine(1),
};
/** Writes a file, as JSON unless it is a text, and returns its path. */
export function written(path: string, content: unknown): string {
  writeFileSync(path, typeof content === "string" ? content : JSON.stringify(content));
  return path;
}

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

/** The report of a pair that is refused. */
export async function refused(...args: string[]): Promise<RefusalReport> {
  const found = await report(...args);
  return found.outcome === "refused" ? found : expect.fail("it was planned");
}

/** What the command says when it cannot run. */
export async function complaint(...args: string[]): Promise<string> {
  const { code, stderr } = await captured(...args);
  expect(code).toBe(EXIT_CODES.couldNotRun);
  return stderr;
}
