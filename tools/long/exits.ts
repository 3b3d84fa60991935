// Runs many processes that use NIXL and end at random places. Each must end with exit code 0 and
// its whole output.
//   node --import tsx tools/long/exits.ts [--count 200] [--seed WORD] [--only NUMBER] [--jobs 2]
import { parseArgs } from "node:util";
import { runExits } from "./run-exits.js";

const { values } = parseArgs({
  options: {
    count: { type: "string", default: "200" },
    seed: { type: "string", default: `${Date.now()}` },
    only: { type: "string" },
    jobs: { type: "string", default: "2" },
  },
});
const { seed, only } = values;
let failed = 0;
let done = 0;

await runExits({
  seed,
  numbers:
    only === undefined ? Array.from({ length: Number(values.count) }, (_, i) => i) : [Number(only)],
  jobs: Number(values.jobs),
  onEnd(failure) {
    done += 1;
    if (failure !== undefined) {
      failed += 1;
      console.log(`FAIL  ${failure}`);
    }
    if (done % 25 === 0) console.log(`${done} processes ended (seed ${seed})`);
  },
});
console.log(`exits: ${done - failed} passed, ${failed} failed`);
process.exitCode = failed === 0 && done > 0 ? 0 : 1;
