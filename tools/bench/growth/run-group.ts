// For a profile of single quantities, name words of them:
// With --trial each cost is measured once, at its smallest size, and not judged.
// node --cpu-prof --expose-gc --import tsx tools/bench/growth/run-group.ts GROUP [--short] [WORD…]
import { parseArgs } from "node:util";
import type { Row } from "../report.js";
import { type Curve, type Group, measure, rowOf } from "./measure.js";

export interface Measured {
  readonly title: string;
  readonly missing?: string | undefined;
  readonly curves: readonly Curve[];
  readonly rows: readonly Row[];
}

const { positionals, values } = parseArgs({
  allowPositionals: true,
  options: {
    short: { type: "boolean", default: false },
    trial: { type: "boolean", default: false },
  },
});
const [name = "", ...words] = positionals;
const { group } = (await import(`./${name}.js`)) as { group: Group };
const { title, missing } = group;
const curves: Curve[] = [];
const rows: Row[] = [];
for (const quantity of missing === undefined ? group.quantities : []) {
  if (!words.every((word) => quantity.name.includes(word))) continue;
  process.stderr.write(`  ${quantity.name} …\n`);
  const [smallest = 0] = quantity.sizes;
  const curve = values.trial
    ? { name: quantity.name, sizes: [smallest], costs: [await quantity.measure(smallest)] }
    : await measure(quantity, values.short);
  curves.push(curve);
  rows.push(rowOf(name === "nixl" ? "NIXL" : name, quantity, curve));
}
console.log(JSON.stringify({ title, missing, curves, rows } satisfies Measured));
