// npm run release:rehearse [-- --out FOLDER]: builds everything, the addons of all platforms too,
// and then runs tools/release/rehearse.ts.
import { join } from "node:path";
import { root, run, runSource, setup } from "../setup/setup.mjs";

const begun = Date.now();
const { nixl } = await setup();
if (!nixl.ready) console.log(`without NIXL: ${nixl.why}`);
for (const script of ["build-platforms.mjs", "build-libs.mjs"]) {
  await run(process.execPath, [join(root, "native/scripts", script)], { show: true });
}
console.log(`ok    everything is built (${((Date.now() - begun) / 1000).toFixed(0)} s)`);
process.exitCode = await runSource("tools/release/rehearse.ts", process.argv.slice(2));
