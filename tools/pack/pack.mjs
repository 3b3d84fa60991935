// npm run pack -- @kv/pull … [--out FOLDER]: packs packages with all that they need of this
// repository, for this platform, and prints the line that installs them. What it does not know,
// such as vitest@4 or --save-dev, becomes part of that line.
import { runSource, setupOrEnd } from "../setup/setup.mjs";

await setupOrEnd({ native: "none" });
process.exitCode = await runSource("tools/pack/main.ts", process.argv.slice(2));
