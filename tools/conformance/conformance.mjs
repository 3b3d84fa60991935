// npm run conformance: replays vectors of vLLM's functions, or recorded traffic of vLLM servers,
// with this repository's sources.
import { existsSync } from "node:fs";
import { isAbsolute, join, resolve } from "node:path";
import { root, runSource } from "../setup/setup.mjs";

const tsx = join(root, "node_modules", "tsx", "dist", "loader.mjs");
if (!existsSync(tsx)) {
  console.error("The packages are not installed. Run: npm run setup");
  process.exit(2);
}

// npm runs scripts in the root; paths are relative to the folder of the command.
const from = process.env.INIT_CWD ?? process.cwd();
const args = process.argv.slice(2).map((arg, index, all) => {
  const isPath =
    all[index - 1] === "--wire" || (!arg.startsWith("-") && all[index - 1] !== "--only");
  return isPath && !isAbsolute(arg) ? resolve(from, arg) : arg;
});
process.exitCode = await runSource("tools/conformance/main.ts", args);
