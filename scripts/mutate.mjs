// npm run mutate [-- --mutate FILE:FROM-TO]: Stryker over the mapping and the plan (stryker.config.mjs). It takes some minutes.
import { spawn } from "node:child_process";
import { join } from "node:path";
import { root } from "./setup.mjs";

spawn(join(root, "node_modules/.bin/stryker"), ["run", "stryker.config.mjs", ...process.argv.slice(2)], {
  cwd: root,
  stdio: "inherit",
}).on("close", (code) => {
  process.exitCode = code ?? 1;
});
