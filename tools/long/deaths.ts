// Ends peers in every way, in every phase and over every route. The agent that knew them must go
// on, and leave nothing behind.
//   node --import tsx tools/long/deaths.ts [--runs 10] [--cells libfabric-tcp,ucx-cma/stop]
import { parseArgs } from "node:util";
import { cablesMissing } from "../../packages/nixl/test/deaths/cable.js";
import { cellsNamed } from "../../packages/nixl/test/deaths/cells.js";
import { runCells } from "../../packages/nixl/test/deaths/run-cells.js";

const { values } = parseArgs({
  options: { runs: { type: "string", default: "10" }, cells: { type: "string", default: "" } },
});
const named = cellsNamed(values.cells.split(",").filter((word) => word !== ""));
const missing = cablesMissing();
const cells = named.filter(({ ending }) => ending !== "cable" || missing === undefined);
if (missing !== undefined) console.log(`SKIPPED  cells with the cable cut: ${missing}`);
let [passed, failed] = [0, 0];
for (let run = 0; run < Number(values.runs); run++) {
  await runCells(cells, ({ cell, problems }) => {
    if (problems.length === 0) passed += 1;
    else failed += 1;
    if (problems.length > 0) console.log(`FAIL  ${cell}: ${problems.join("; ")}`);
  });
  console.log(`run ${run + 1} of ${values.runs}: ${cells.length} cells`);
}
console.log(`deaths: ${passed} passed, ${failed} failed`);
process.exitCode = failed === 0 && passed > 0 ? 0 : 1;
