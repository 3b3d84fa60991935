// A long suite: a benchmark's own test.

import { execFile } from "node:child_process";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { promisify } from "node:util";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, onTestFinished, test } from "vitest";
import type { Row } from "../report.js";
import { EVENTS } from "./events.js";
import { blocksOfInfiniteCache, OUR_TRACE, readTrace } from "./turns.js";

const MAIN = join(import.meta.dirname, "../main.ts");

/** A process of its own: the arena takes cores for itself. */
async function rowsOf(only: string): Promise<readonly Row[]> {
  const args = ["--import", "tsx", MAIN, "arena", "--short", "--json", "--only", only];
  const options = { maxBuffer: 1 << 26 };
  const running = promisify(execFile)(process.execPath, args, options);
  // A row that misses its goal ends it with 1: the short form measures nothing.
  const { stdout } = await running.catch((error: { stdout: string }) => error);
  return JSON.parse(stdout) as readonly Row[];
}

test.skipIf(process.platform !== "linux").each(Object.keys(EVENTS))(
  "%s: the arena has figures of kv-proxy",
  async (event) => {
    const rows = await rowsOf(`kv-proxy-node-20,${event}`);
    expect(rows.filter(({ ours }) => ours.startsWith("not here"))).toEqual([]);
    expect(rows.length).toBeGreaterThan(1);
    for (const { what, ours, rounds } of rows.slice(1))
      expect([what, ours, rounds]).toEqual([what, expect.not.stringContaining("NaN"), 1]);
  },
  120_000,
);

test("the trace of ours is read, and another form is refused", () => {
  const trace = readTrace(OUR_TRACE);
  expect(trace).toHaveLength(335);
  expect(blocksOfInfiniteCache(trace)).toBe(5816);
  const file = join(scratchFolder(onTestFinished), "trace.jsonl");
  writeFileSync(file, '{"timestamp":0,"input_length":10,"output_length":1,"hash_ids":[0]}\n');
  expect(readTrace(file)).toHaveLength(1);
  writeFileSync(file, '{"timestamp":0,"input_length":10,"output_length":1,"hash_ids":"0"}\n');
  expect(() => readTrace(file)).toThrow("line 1 of the trace");
});
