// npm run bench [-- NAME… [--only PART,…] [--json] [--record]]
import { spawn } from "node:child_process";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { endWithNpm } from "./end-with-npm.mjs";
import { root, setup } from "./setup.mjs";

endWithNpm();

const { nixl } = await setup();
const { positionals: names, values } = parseArgs({
  strict: false,
  allowPositionals: true,
  options: { only: { type: "string" } },
});
const parts = values.only?.split(",");
const simulated =
  (names.join() === "push-vs-pull" && parts?.includes("processes") === false) ||
  (names.join() === "multi-turn" && parts?.join() === "links");
if (!nixl.ready && !simulated && !["proxy", "epp", "growth", "fairness"].includes(names.join())) {
  console.error(`the benchmarks compare with NIXL's Python API and need NIXL: ${nixl.why}`);
  process.exit(1);
}
// The benchmark of plans collects garbage before it measures memory.
const args = ["--expose-gc", "--import", "tsx", join(root, "bench/main.ts"), ...process.argv.slice(2)];
const child = spawn(process.execPath, args, { cwd: root, stdio: "inherit" }).on("close", (code) => {
  process.exitCode = code ?? 1;
});
// Ctrl-C reaches both.
for (const signal of ["SIGTERM", "SIGHUP"]) process.on(signal, () => child.kill(signal));
