import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { loadavg, release } from "node:os";
import { fileURLToPath } from "node:url";
import { DEFAULT_VERSION } from "../../packages/nixl/src/install/wheels.js";
import { machine } from "../tested/machine.js";
import { type Row, rounded } from "./report.js";

/** In docs/bench/NAME.json. The pages' tables are made from these files (record-tables.ts). */
export interface Run {
  readonly date: string;
  readonly command: string;
  readonly machine: string;
  readonly kernel: string;
  readonly node: string;
  readonly nixl: string;
  readonly load?: { readonly before: number; readonly after: number };
  readonly rows: readonly Row[];
}

/** Runs of one machine that a page shows beside each other. @default 1 */
const WHOLE_RUNS: Readonly<Record<string, number>> = { arena: 2 };

export const load = (): number => Number((loadavg()[0] ?? Number.NaN).toFixed(1));

export function record(
  name: string,
  rows: readonly Row[],
  loadBefore: number,
  only?: string,
): void {
  const run: Run = {
    date: new Date().toISOString().slice(0, 10),
    command: `npm run bench -- ${name}${only === undefined ? "" : ` --only ${only}`}`,
    machine: machine(),
    kernel: release(),
    node: process.versions.node,
    nixl: DEFAULT_VERSION,
    load: { before: loadBefore, after: load() },
    rows: rows.filter(({ ours, ratio }) => ours !== "-" || ratio !== undefined).map(rounded),
  };
  const file = new URL(`../../docs/bench/${name}.json`, import.meta.url);
  const before = existsSync(file) ? (JSON.parse(readFileSync(file, "utf8")) as Run[]) : [];
  writeFileSync(
    file,
    `${JSON.stringify(withRun(before, run, only !== undefined, WHOLE_RUNS[name]), null, 2)}\n`,
  );
  console.error(
    `${fileURLToPath(file)} is written; npx vitest run tools/docs/page-parts.test.ts -u writes the pages`,
  );
}

/** The last whole runs of a machine count, and the last run for the rows of a part. */
export function withRun(
  runs: readonly Run[],
  run: Run,
  part: boolean,
  wholeRuns = 1,
): readonly Run[] {
  const names = new Set(run.rows.map(({ what }) => what));
  const ofMachine = runs.filter(({ machine }) => machine === run.machine);
  const replaced = new Set(part ? ofMachine : ofMachine.toReversed().slice(wholeRuns - 1));
  const kept = runs.map((each) => ({
    ...each,
    rows: each.rows.filter(({ what }) => !replaced.has(each) || (part && !names.has(what))),
  }));
  return [...kept, run].filter(({ rows }) => rows.length > 0);
}
