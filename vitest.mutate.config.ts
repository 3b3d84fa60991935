import { defineConfig, mergeConfig } from "vitest/config";
import shared from "./vitest.config.js";

// The tests that judge a mutated mapping or plan; for `npm run mutate`.
export default mergeConfig(
  { ...shared, test: { ...shared.test, include: [] } },
  defineConfig({
    test: {
      include: [
        "packages/topology/{src,test}/**/*.test.ts",
        "packages/plan/src/*.test.ts",
        "packages/plan/test/{moves-the-right-bytes,kinds-move-the-right-bytes,proof,proof-kinds,vectors}.test.ts",
      ],
      bail: 1,
    },
  }),
);
