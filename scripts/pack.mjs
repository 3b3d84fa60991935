// npm run pack -- @kv/pull … [--out FOLDER]: packs packages with all that they need of this repository, for this platform, and prints the line that
// installs them. What it does not know, such as vitest@4 or --save-dev, becomes part of that line.
import { join } from "node:path";
import { root, runInTerminal, setup } from "./setup.mjs";

try {
  await setup({ native: "none" });
} catch (error) {
  process.stderr.write(`set-up failed: ${error.message}\n`);
  process.exit(2);
}
const main = join(root, "tools/pack/main.ts");
process.exitCode = await runInTerminal(process.execPath, ["--import", "tsx", main, ...process.argv.slice(2)]);
