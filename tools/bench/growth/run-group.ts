// Measures one group and prints it as JSON. For a profile of single quantities, name words of them:
//   node --cpu-prof --expose-gc --import tsx tools/bench/growth/run-group.ts GROUP [--short] [WORD…]
import { parseArgs } from "node:util";
import { median } from "../report.js";
import { processorMs } from "./costs.js";
import { growthExponent, TOLERANCE } from "./exponent.js";
import { GROUPS } from "./groups.js";
import type { Measured, MeasuredGroup, Quantity } from "./quantity.js";

const ROUNDS = 5;
/**
 * Processor time of measurements at the two smallest sizes before the first round, so that V8 has
 * compiled the code.
 */
const WARM_MS = 1000;

const { positionals, values } = parseArgs({
  allowPositionals: true,
  options: { short: { type: "boolean", default: false } },
});
const [name = "", ...words] = positionals;
const group = await GROUPS[name]?.();
if (group === undefined) throw new Error(`no group is called ${JSON.stringify(name)}`);
const quantities: Measured[] = [];
if (group.missing === undefined) {
  for (const quantity of group.quantities.filter(({ name }) =>
    words.every((word) => name.includes(word)),
  )) {
    process.stderr.write(`  ${quantity.name} …\n`);
    quantities.push(await measure(quantity));
  }
}
const { title, missing } = group;
console.log(JSON.stringify({ name, title, missing, quantities } satisfies MeasuredGroup));

async function measure(quantity: Quantity): Promise<Measured> {
  const { name, unit, sizeOf, exponent, most } = quantity;
  const sizes = values.short ? quantity.sizes.slice(0, 3) : quantity.sizes;
  for (const untilMs = processorMs() + WARM_MS; processorMs() < untilMs; )
    for (const size of sizes.slice(0, 2)) await quantity.measure(size);
  const runs = sizes.map((): number[] => []);
  for (let round = 0; round < ROUNDS; round++) {
    for (const [i, size] of sizes.entries()) {
      runs[i]?.push(await quantity.measure(size));
    }
  }
  const costs = runs.map(median);
  const growth = growthExponent(sizes, costs);
  const met =
    growth <= exponent + TOLERANCE && Math.max(...costs) <= (most ?? Number.POSITIVE_INFINITY);
  return {
    name,
    unit,
    sizeOf,
    sizes,
    costs,
    growth,
    exponent,
    ...(most === undefined ? {} : { most }),
    met,
  };
}
