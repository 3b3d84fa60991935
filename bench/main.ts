// npm run bench [-- NAME…]: every figure is a ratio of two things measured in turn, in one run, on this machine.
import { mapping } from "./mapping.js";
import { neuron } from "./neuron.js";
import { nixl } from "./nixl/index.js";
import { plan } from "./plan.js";
import { prepare } from "./prepare.js";
import { proxy } from "./proxy.js";
import { pushVsPull } from "./push-vs-pull/index.js";
import { read } from "./read.js";
import type { Row } from "./report.js";
import { printRows } from "./report.js";

const BENCHMARKS: Readonly<Record<string, () => Promise<readonly Row[]>>> = {
  read,
  prepare,
  mapping,
  proxy,
  plan,
  nixl,
  neuron,
  "push-vs-pull": pushVsPull,
};

const asked = process.argv.slice(2).filter((word) => !word.startsWith("--"));
const unknown = asked.filter((name) => !(name in BENCHMARKS));
if (unknown.length > 0) {
  console.error(`no benchmark ${unknown.join(", ")}; there are ${Object.keys(BENCHMARKS).join(", ")}`);
  process.exit(2);
}
const rows: Row[] = [];
for (const name of asked.length > 0 ? asked : Object.keys(BENCHMARKS)) {
  process.stderr.write(`${name} …\n`);
  rows.push(...((await BENCHMARKS[name]?.()) ?? []));
}
if (process.argv.includes("--json")) console.log(JSON.stringify(rows, null, 2));
else printRows(rows);
process.exitCode = rows.some((row) => row.met === false) ? 1 : 0;
