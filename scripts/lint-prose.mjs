// npm run lint:prose [-- FILE …]: checks the prose of the pages with vale, by the rules of tools/prose.
import { spawnSync } from "node:child_process";
import { pages, vale } from "./go-linters.mjs";
import { root } from "./setup.mjs";

const requested = process.argv.slice(2);
const files = requested.length > 0 ? requested : pages();
const { status } = spawnSync(await vale.fetch(), ["--output=line", ...files], {
  cwd: root,
  stdio: "inherit",
});
process.exitCode = status ?? 1;
