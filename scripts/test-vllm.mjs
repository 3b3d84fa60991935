// npm run test:vllm: sets up real vLLM on the CPU once, then runs the live tests against it. Not part of npm test.
import { spawn } from "node:child_process";
import { join } from "node:path";
import { root, run, setup } from "./setup.mjs";

const { nixl } = await setup();
if (!nixl.ready) {
  console.error(`live tests need NIXL: ${nixl.why}`);
  process.exit(1);
}
await run("bash", [join(root, "tools/vllm/setup.sh")], { show: true });
const vitest = join(root, "node_modules/.bin/vitest");
const args = ["run", "--config", "vitest.vllm.config.ts", ...process.argv.slice(2)];
spawn(vitest, args, { cwd: root, stdio: "inherit" }).on("close", (code) => {
  process.exitCode = code ?? 1;
});
