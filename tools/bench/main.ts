// npm run bench [-- NAME… [--only PART,…] [--json] [--record]]: every ratio compares two
// measurements taken in turn, in one run, on this machine.
import { parseArgs } from "node:util";
import { disaggregation } from "./disaggregation.js";
import { epp } from "./epp.js";
import { fairness } from "./fairness.js";
import { growth } from "./growth/index.js";
import { multiTurn } from "./multi-turn/index.js";
import { neuron } from "./neuron.js";
import { nixl } from "./nixl/index.js";
import { plan } from "./plan.js";
import { prepare } from "./prepare.js";
import { proxy } from "./proxy.js";
import { proxyWorkers } from "./proxy-workers.js";
import { pushVsPull } from "./push-vs-pull/index.js";
import { load, record } from "./record.js";
import type { Row } from "./report.js";
import { printRows } from "./report.js";

/** Each benchmark gets the parts of --only, if any. */
const BENCHMARKS: Readonly<
  Record<string, (only: readonly string[] | undefined) => Promise<readonly Row[]>>
> = {
  prepare,
  proxy,
  epp,
  "proxy-workers": proxyWorkers,
  fairness,
  plan,
  nixl,
  neuron,
  "push-vs-pull": pushVsPull,
  disaggregation,
  "multi-turn": multiTurn,
  growth,
};

/** These write their pages themselves with --record. */
const WITH_OWN_PAGES = ["push-vs-pull", "multi-turn", "growth"];

const { positionals: names, values } = parseArgs({
  allowPositionals: true,
  options: {
    json: { type: "boolean" },
    only: { type: "string" },
    record: { type: "boolean" },
    short: { type: "boolean" },
  },
});
const unknown = names.filter((name) => !(name in BENCHMARKS));
if (unknown.length > 0) {
  console.error(
    `no benchmark is called ${unknown.join(", ")}; the benchmarks are ${Object.keys(BENCHMARKS).join(", ")}`,
  );
  process.exit(2);
}
const rows: Row[] = [];
for (const name of names.length > 0 ? names : Object.keys(BENCHMARKS)) {
  process.stderr.write(`${name} …\n`);
  const before = load();
  const measured = (await BENCHMARKS[name]?.(values.only?.split(","))) ?? [];
  if (values.record === true && !WITH_OWN_PAGES.includes(name))
    record(name, measured, before, values.only);
  rows.push(...measured);
}
if (values.json === true) console.log(JSON.stringify(rows, null, 2));
else printRows(rows);
process.exitCode = rows.some((row) => row.met === false) ? 1 : 0;
