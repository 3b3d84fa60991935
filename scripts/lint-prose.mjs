// npm run lint:prose [-- FILE …]: checks the prose of the pages with vale, by the rules of tools/prose.
import { spawnSync } from "node:child_process";
import { fetchLinter, pages, vale } from "./go-linters.mjs";
import { root } from "./setup.mjs";

const requested = process.argv.slice(2);
const files = requested.length > 0 ? requested : pages();
const { status } = spawnSync(await fetchLinter(vale), ["--output=line", ...files], {
  cwd: root,
  stdio: "inherit",
});
process.exitCode = status ?? 1;
