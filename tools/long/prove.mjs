// npm run prove [-- --factor 50]: the properties of @kv/plan and @kv/topology, with many more cases
// than in npm test.
import { parseArgs } from "node:util";
import { runInTerminal, vitest } from "../setup/setup.mjs";

const { values } = parseArgs({ options: { factor: { type: "string", default: "50" } } });
if (!(Number(values.factor) > 0)) {
  console.error(`--factor must be a number above 0, not ${JSON.stringify(values.factor)}`);
  process.exit(2);
}
const files = ["packages/plan", "packages/kv-plan/src/data", "packages/topology"];
const args = ["run", "--config", "tools/long/vitest.config.ts", ...files];
process.exitCode = await runInTerminal(vitest, args, {
  ...process.env,
  KV_PROPERTY_FACTOR: values.factor,
});
