import { execFile } from "node:child_process";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { compare, type Row } from "./report.js";
import type { Run } from "./run.js";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));

/** A benchmark in this tree and in another one, in turn, twice each. The times of both as rows. */
export async function besideTree(tree: string, name: string, run: Run): Promise<readonly Row[]> {
  const figures = new Map<string, { what: string; both: [number[], number[]] }>();
  for (const at of [0, 1, 1, 0] as const) {
    const seen = new Map<string, number>();
    for (const { what, ours } of await rowsIn(at === 0 ? ROOT : tree, name, run)) {
      // Some names have measured numbers in them.
      const words = what.replace(/\d[\d.]*/g, "#");
      seen.set(words, (seen.get(words) ?? 0) + 1);
      const key = `${seen.get(words)} ${words}`;
      const row = figures.get(key) ?? { what, both: [[], []] };
      row.both[at].push(figureOf(ours));
      figures.set(key, row);
    }
  }
  return Array.from(figures.values())
    .filter(({ both }) => both.every(({ length }) => length > 0))
    .map(({ what, both }) => compare(what, both, "", "<="));
}

async function rowsIn(tree: string, name: string, { only, short }: Run): Promise<readonly Row[]> {
  const args = [
    "tools/bench/bench.mjs",
    name,
    "--json",
    ...(only === undefined ? [] : ["--only", only.join()]),
    ...(short ? ["--short"] : []),
  ];
  process.stderr.write(`  in ${tree}\n`);
  // A row that misses its goal ends it with 1.
  const { stdout } = await promisify(execFile)(process.execPath, args, {
    cwd: tree,
    maxBuffer: 1 << 26,
  }).catch((error: { code?: unknown; stdout: string }) => {
    if (error.code === 1) return error;
    throw error;
  });
  return JSON.parse(stdout) as readonly Row[];
}

/** The median of `min / median / max`, or the last number: that of the largest size. */
function figureOf(shown: string): number {
  const numbers = shown.replace(/(\d),(?=\d{3})/g, "$1").match(/-?\d+(\.\d+)?/g) ?? [];
  return Number(shown.includes(" / ") ? numbers[1] : numbers.at(-1));
}
