import { execFile } from "node:child_process";
import { join } from "node:path";
import { promisify } from "node:util";
import { compare, type Row } from "./report.js";
import type { Run } from "./run.js";

const ROOT = join(import.meta.dirname, "../..");
const MEASURED = /\(.*?\)|\bat \d+|[\d.]+ [\d.]+ [\d.]+$/g;

/** In turn, twice each. Rows: this tree / the other. */
export async function besideTree(tree: string, name: string, run: Run) {
  const figures = new Map<string, [number[], number[]]>();
  for (const at of [0, 1, 1, 0] as const)
    for (const { what, ours } of await rowsIn(at === 0 ? ROOT : tree, name, run)) {
      const key = what.replace(MEASURED, "…");
      const both = figures.get(key) ?? [[], []];
      both[at].push(figureOf(ours));
      figures.set(key, both);
    }
  return Array.from(figures)
    .filter(([, both]) => both.every(({ length }) => length > 0))
    .map(([what, both]) => compare(what, both, "", "<="));
}

async function rowsIn(tree: string, name: string, { only, short }: Run) {
  const args = ["tools/bench/bench.mjs", name, "--json", ...(short ? ["--short"] : [])];
  if (only !== undefined) args.push("--only", only.join());
  process.stderr.write(`  in ${tree}\n`);
  const options = { cwd: tree, maxBuffer: 1 << 26 };
  const running = promisify(execFile)(process.execPath, args, options);
  // A row that misses its goal ends it with 1.
  const { stdout } = await running.catch((error: { code?: unknown; stdout: string }) => {
    if (error.code === 1) return error;
    throw error;
  });
  return JSON.parse(stdout) as readonly Row[];
}

/** Of `min / median / max`, or of the largest size. */
function figureOf(shown: string): number {
  const numbers = shown.replace(/(\d),(?=\d{3})/g, "$1").match(/-?\d+(\.\d+)?/g) ?? [];
  return Number(shown.includes(" / ") ? numbers[1] : numbers.at(-1));
}
