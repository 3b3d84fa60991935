// npm run bench [-- NAME… [--only PART,…] [--short] [--vs TREE] [--json] [--record]]
import { endWithNpm } from "../setup/end-with-npm.mjs";
import { runSource, setup } from "../setup/setup.mjs";

endWithNpm();

await setup();
process.exitCode = await runSource("tools/bench/main.ts", process.argv.slice(2));
