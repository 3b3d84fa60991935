import { fileURLToPath } from "node:url";
import { defineConfig } from "vitest/config";

const packages = fileURLToPath(new URL("./packages", import.meta.url));

export default defineConfig({
  resolve: {
    alias: [
      { find: /^@kv\/conformance\/(.+)$/, replacement: `${packages}/conformance/src/$1.ts` },
      { find: /^@kv\/plan\/(.+)$/, replacement: `${packages}/plan/src/$1/index.ts` },
      { find: /^@kv\/([a-z-]+)$/, replacement: `${packages}/$1/src/index.ts` },
    ],
  },
  test: {
    include: ["{packages,apps}/*/{src,test}/**/*.test.ts", "tools/**/*.test.ts"],
    testTimeout: 60_000,
    hookTimeout: 60_000,
    // The default of 1 s is less than a busy machine may need.
    expect: { poll: { timeout: 30_000 } },
    maxWorkers: 2,
  },
});
