import { defineConfig, mergeConfig } from "vitest/config";
import shared from "../../vitest.config.js";

// `npm run test:vllm`, and the faults of NIXL's libraries for `test:versions`: one file at a time, minutes each.
export default mergeConfig(
  { ...shared, test: { ...shared.test, projects: undefined, include: [] } },
  defineConfig({
    test: {
      include: ["tools/{clients,nixl,vllm}/**/*.live.ts"],
      fileParallelism: false,
      testTimeout: 600_000,
      hookTimeout: 600_000,
      // As in serve.sh: two processes connect only over a transport that both allow. UCX reads a
      // process's environment, so tests run in forks.
      pool: "forks",
      env: { UCX_TLS: "tcp,self", UCX_NET_DEVICES: "lo" },
    },
  }),
);
