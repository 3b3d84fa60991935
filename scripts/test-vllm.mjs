// npm run test:vllm: sets up real vLLM on the CPU once, then runs the live tests against it. Not part of npm test.
//     --only pull-0.33,push-0.33,pull-0.32,push-0.32,kinds,proxy
// What follows is vitest's: -t "P with TP 1" runs one suite, and starts the servers that it needs.
import { spawn } from "node:child_process";
import { join } from "node:path";
import { root, run, setup } from "./setup.mjs";

const PARTS = ["pull-0.33", "push-0.33", "pull-0.32", "push-0.32", "kinds", "proxy"];
const given = process.argv.slice(2);
const at = given.indexOf("--only");
const [, list = ""] = at < 0 ? ["", PARTS.join(",")] : given.splice(at, 2);
const only = list.split(",");
for (const part of only) {
  if (PARTS.includes(part)) continue;
  console.error(`--only is ${JSON.stringify(part)}, not of ${PARTS.join(", ")}`);
  process.exit(2);
}

const { nixl } = await setup();
if (!nixl.ready) {
  console.error(`live tests need NIXL: ${nixl.why}`);
  process.exit(1);
}
await run("bash", [join(root, "tools/vllm/setup.sh")], { show: true });
const vitest = join(root, "node_modules/.bin/vitest");
const args = [
  "run",
  "--config",
  "vitest.vllm.config.ts",
  ...only.map((part) => `tools/vllm/${part}.live.ts`),
  ...given,
];
spawn(vitest, args, { cwd: root, stdio: "inherit" }).on("close", (code) => {
  process.exitCode = code ?? 1;
});
