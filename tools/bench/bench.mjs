// npm run bench [-- NAME… [--only PART,…] [--json] [--record]]
import { parseArgs } from "node:util";
import { endWithNpm } from "../setup/end-with-npm.mjs";
import { runSource, setup } from "../setup/setup.mjs";

endWithNpm();

const { nixl } = await setup();
const { positionals: names, values } = parseArgs({
  strict: false,
  allowPositionals: true,
  options: { only: { type: "string" } },
});
const parts = values.only?.split(",");
const simulated =
  (names.join() === "push-vs-pull" && parts?.includes("processes") === false) ||
  (names.join() === "multi-turn" && parts?.join() === "links");
if (!nixl.ready && !simulated && !["proxy", "epp", "growth", "fairness"].includes(names.join())) {
  console.error(`the benchmarks compare with NIXL's Python API and need NIXL: ${nixl.why}`);
  process.exit(1);
}
process.exitCode = await runSource("tools/bench/main.ts", process.argv.slice(2));
