import { cablesMissing } from "../../../packages/nixl/test/deaths/cable.js";
import { cellsNamed } from "../../../packages/nixl/test/deaths/cells.js";
import { runCells } from "../../../packages/nixl/test/deaths/run-cells.js";
import { type Check, type Row, rowOf } from "../row.js";

const RUNS = 10;

export async function runDeaths(words: readonly string[]): Promise<Row> {
  const missing = cablesMissing();
  const cells = cellsNamed(words).filter(
    ({ ending }) => ending !== "cable" || missing === undefined,
  );
  const checks: Check[] = [];
  let ended = 0;
  for (let run = 0; run < RUNS; run += 1)
    await runCells(cells, ({ cell, problems }) => {
      ended += 1;
      if (problems.length > 0) checks.push([`${cell}: ${problems.join("; ")}`, false]);
    });

  const without = missing === undefined ? "" : `; SKIPPED: the cable cut, ${missing}`;
  checks.unshift([`${ended} peers ended${without}`, ended > 0]);
  return rowOf("deaths of peers", `${RUNS} runs of ${cells.length} cells`, checks);
}
