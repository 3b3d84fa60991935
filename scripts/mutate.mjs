// npm run mutate [-- --mutate FILE:FROM-TO]: Stryker over the mapping and the plan (stryker.config.mjs), best file by file: docs/design/mutation.md.
import { spawn } from "node:child_process";
import { join } from "node:path";
import { root } from "./setup.mjs";

const args = process.argv.slice(2);
const files = args[args.indexOf("--mutate") + 1] ?? "";
const onlyTopology =
  args.includes("--mutate") && files.split(",").every((file) => file.startsWith("packages/topology/"));

spawn(join(root, "node_modules/.bin/stryker"), ["run", "stryker.config.mjs", ...args], {
  cwd: root,
  stdio: "inherit",
  env: { ...process.env, KV_MUTATE_SCOPE: onlyTopology ? "topology" : "plan" },
}).on("close", (code) => {
  process.exitCode = code ?? 1;
});
