import { defineConfig, mergeConfig } from "vitest/config";
import shared from "./vitest.config.js";

// Live against real vLLM servers on this machine: one file at a time, minutes each. `npm run test:vllm`.
export default mergeConfig(
  { ...shared, test: { ...shared.test, include: [] } },
  defineConfig({
    test: {
      include: ["tools/vllm/**/*.live.ts"],
      fileParallelism: false,
      testTimeout: 600_000,
      hookTimeout: 600_000,
      // UCX finds a way between two processes only when both allow it: as in serve.sh. A process of its own, so that UCX sees them.
      pool: "forks",
      env: { UCX_TLS: "tcp,self", UCX_NET_DEVICES: "lo" },
    },
  }),
);
