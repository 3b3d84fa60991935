// Every ratio compares two measurements taken in turn, in one run, on this machine. With --vs:
// those of the same benchmark in another tree of this repository.
import { parseArgs } from "node:util";
import { arena } from "./arena/index.js";
import { growth } from "./growth/index.js";
import { multiTurn } from "./multi-turn.js";
import { nixl } from "./nixl/index.js";
import { besideTree } from "./other-tree.js";
import { plan } from "./plan.js";
import { prepare } from "./prepare.js";
import { pushVsPull } from "./push-vs-pull.js";
import { load, record } from "./record.js";
import { printRows, type Row } from "./report.js";
import { Run } from "./run.js";
import { tier } from "./tier.js";

const BENCHMARKS: Readonly<Record<string, (run: Run) => Promise<readonly Row[]>>> = {
  prepare,
  arena,
  plan,
  nixl,
  "push-vs-pull": pushVsPull,
  "multi-turn": multiTurn,
  growth,
  tier,
};

const { positionals, values } = parseArgs({
  allowPositionals: true,
  options: {
    json: { type: "boolean" },
    only: { type: "string" },
    record: { type: "boolean" },
    short: { type: "boolean" },
    trace: { type: "string" },
    vs: { type: "string" },
  },
});
const unknown = positionals.filter((name) => !(name in BENCHMARKS));
if (unknown.length > 0) {
  console.error(
    `no benchmark is called ${unknown.join(", ")}; the benchmarks are ${Object.keys(BENCHMARKS).join(", ")}`,
  );
  process.exit(2);
}
const run = new Run(values);
const rows: Row[] = [];
for (const name of positionals.length > 0 ? positionals : Object.keys(BENCHMARKS)) {
  process.stderr.write(`${name} …\n`);
  if (values.vs !== undefined) {
    rows.push(...(await besideTree(values.vs, name, run)));
    continue;
  }
  const before = load();
  const measured = (await BENCHMARKS[name]?.(run)) ?? [];
  if (run.record) record(name, measured, before, values.only);
  rows.push(...measured);
}
if (values.json === true) console.log(JSON.stringify(rows, null, 2));
else printRows(rows);
// Side channels and KV events that it plays are still open.
process.stdout.write("", () => process.exit(rows.some((row) => row.met === false) ? 1 : 0));
