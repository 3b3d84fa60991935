import { defineConfig, mergeConfig } from "vitest/config";
import shared from "../../vitest.config.js";

// Live tests against vLLM servers on this machine, one file at a time, minutes each:
// `npm run test:vllm`.
export default mergeConfig(
  { ...shared, test: { ...shared.test, projects: undefined, include: [] } },
  defineConfig({
    test: {
      include: ["tools/{clients,vllm}/**/*.live.ts"],
      fileParallelism: false,
      testTimeout: 600_000,
      hookTimeout: 600_000,
      // The same UCX settings as in serve.sh: two processes connect only over a transport that both
      // allow. UCX reads them from the environment of a process, so tests run in forks.
      pool: "forks",
      env: { UCX_TLS: "tcp,self", UCX_NET_DEVICES: "lo" },
    },
  }),
);
