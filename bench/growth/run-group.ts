// Measures one group and prints it as JSON. For a profile of single quantities, name words of them:
//   node --cpu-prof --expose-gc --import tsx bench/growth/run-group.ts GROUP [--short] [WORD…]
import { parseArgs } from "node:util";
import { median } from "../report.js";
import { collectGarbage } from "./costs.js";
import { growthExponent, TOLERANCE } from "./exponent.js";
import { GROUPS } from "./groups.js";
import type { Measured, MeasuredGroup, Quantity } from "./quantity.js";

const ROUNDS = 5;
/** The code is compiled and the first fixtures are made at these many sizes before the first round. */
const WARM_SIZES = 2;

const { positionals, values } = parseArgs({
  allowPositionals: true,
  options: { short: { type: "boolean", default: false } },
});
const [name = "", ...words] = positionals;
const group = await GROUPS[name]?.();
if (group === undefined) throw new Error(`no group is called ${JSON.stringify(name)}`);
const quantities: Measured[] = [];
if (group.missing === undefined) {
  for (const quantity of group.quantities.filter(({ name }) => words.every((word) => name.includes(word)))) {
    process.stderr.write(`  ${quantity.name} …\n`);
    quantities.push(await measure(quantity));
  }
}
const { title, missing } = group;
console.log(JSON.stringify({ name, title, missing, quantities } satisfies MeasuredGroup));

async function measure(quantity: Quantity): Promise<Measured> {
  const { name, unit, sizeOf, exponent, most } = quantity;
  const sizes = values.short ? quantity.sizes.slice(0, 3) : quantity.sizes;
  for (const size of sizes.slice(0, WARM_SIZES)) await quantity.measure(size);
  const runs = sizes.map((): number[] => []);
  for (let round = 0; round < ROUNDS; round++) {
    for (const [i, size] of sizes.entries()) {
      collectGarbage();
      runs[i]?.push(await quantity.measure(size));
    }
  }
  const costs = runs.map(median);
  const growth = growthExponent(sizes, costs);
  const met = growth <= exponent + TOLERANCE && Math.max(...costs) <= (most ?? Number.POSITIVE_INFINITY);
  return { name, unit, sizeOf, sizes, costs, growth, exponent, ...(most === undefined ? {} : { most }), met };
}
