// npm run test:vllm: installs vLLM for the CPU once, then runs the live tests against its servers. Not part of npm test.
//     --only pull-0.33,push-0.33,pull-0.32,push-0.32,kinds,cache-formats,proxy,readback,verify,pull-0.31,push-0.31,fleet,data-parallel,envoy
// All other arguments go to vitest: -t "P with TP 1" runs one suite and starts only the servers that it needs.
import { spawn } from "node:child_process";
import { join } from "node:path";
import { root, run, setup } from "./setup.mjs";

const PARTS = [
  "pull-0.33",
  "push-0.33",
  "pull-0.32",
  "push-0.32",
  "kinds",
  "cache-formats",
  "proxy",
  "readback",
  "verify",
];
/** They run when they are named. */
const NAMED = ["envoy", "pull-0.31", "push-0.31", "fleet", "data-parallel"];
const args = process.argv.slice(2);
const at = args.indexOf("--only");
const [, list = ""] = at < 0 ? ["", PARTS.join(",")] : args.splice(at, 2);
const only = list.split(",");
for (const part of only) {
  if ([...PARTS, ...NAMED].includes(part)) continue;
  console.error(`--only must be of ${[...PARTS, ...NAMED].join(", ")}, not ${JSON.stringify(part)}`);
  process.exit(2);
}

const { nixl } = await setup();
if (!nixl.ready) {
  console.error(`live tests need NIXL: ${nixl.why}`);
  process.exit(1);
}
await run("bash", [join(root, "tools/vllm/setup.sh")], { show: true });
const vitest = join(root, "node_modules/.bin/vitest");
const vitestArgs = [
  "run",
  "--config",
  "vitest.vllm.config.ts",
  ...only.map((part) => `tools/vllm/${part}.live.ts`),
  ...args,
];
spawn(vitest, vitestArgs, { cwd: root, stdio: "inherit" }).on("close", (code) => {
  process.exitCode = code ?? 1;
});
