// npm run test:clients: clients as their users have them (openai and litellm of Python, those of
// npm, curl) in front of kv-proxy and of Envoy, with recorded answers and the demo's engines behind
// them. Fetches the Python clients once (380 MB on disk).
//   npm run test:clients -- --live      # vLLM 0.33 behind them (sets it up once, as npm run test:vllm)
//   npm run test:clients -- --record    # record vLLM's answers anew
// All other arguments go to vitest.
import { join } from "node:path";
import { root, run, runInTerminal, setup, setupWithNixl, vitest } from "../setup/setup.mjs";

const args = process.argv.slice(2);
const [isLive, isRecording] = ["--live", "--record"].map((flag) => {
  const at = args.indexOf(flag);
  return at >= 0 && args.splice(at, 1).length > 0;
});
let suites = ["tools/clients"];
if (isLive || isRecording) {
  await setupWithNixl("live tests need NIXL");
  await run("bash", [join(root, "tools/vllm/setup.sh")], { show: true });
  suites = ["--config", "tools/vllm/vitest.config.ts", "tools/clients/clients.live.ts"];
} else await setup();
const env = { ...process.env, KV_LONG: "1", ...(isRecording ? { KV_RECORD: "1" } : {}) };
process.exitCode = await runInTerminal(vitest, ["run", ...suites, ...args], env);
