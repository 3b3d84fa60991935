import { readdirSync } from "node:fs";
import { entryPoints } from "./scripts/build.mjs";

/** The packages: what is built from, and the tests. */
const packages = Object.fromEntries(
  readdirSync("packages").map((name) => [
    `packages/${name}`,
    {
      entry: [...entryPoints(`packages/${name}`), "test/**/*.ts", "src/**/*.test.ts"],
      project: ["src/**/*.ts", "test/**/*.ts"],
    },
  ]),
);

export default {
  workspaces: {
    ...packages,
    "packages/kv-plan": {
      entry: [...packages["packages/kv-plan"].entry, "page/{planner,report-page,build}.ts", "page/*.test.ts"],
      project: ["src/**/*.ts", "test/**/*.ts", "page/*.ts"],
    },
    "apps/demo": {
      entry: [...entryPoints("apps/demo"), "test/**/*.ts"],
      project: ["src/**/*.ts", "test/**/*.ts"],
    },
    ".": {
      entry: [
        "scripts/*.mjs",
        "bench/main.ts",
        "bench/fast-upstream.ts",
        "bench/fairness-attacks.ts",
        "bench/fairness-proxy.ts",
        "bench/fairness-turns.ts",
        "bench/proxy-upstream.ts",
        "bench/turn-upstream.ts",
        "bench/nixl/target.ts",
      ],
      project: ["scripts/**/*.mjs", "bench/**/*.ts"],
    },
    native: {
      entry: ["build.mjs", "scripts/build-platforms.mjs", "scripts/*.d.mts"],
      ignoreDependencies: ["node-addon-api", "node-api-headers"],
    },
    examples: {
      entry: ["*.mjs"],
      project: ["*.mjs"],
    },
    tools: {
      entry: ["**/*.ts"],
      project: ["**/*.ts"],
    },
    "packages/testing": {
      entry: ["src/**/*.ts"],
      project: ["src/**/*.ts"],
    },
  },
  exclude: ["types", "duplicates"],
  ignoreBinaries: [
    "apt-get",
    "dpkg",
    "ip",
    "nvidia-smi",
    "openssl",
    "prlimit",
    "readelf",
    "ss",
    "taskset",
    "unshare",
  ],
  ignoreDependencies: ["@kv/testing", "dependency-cruiser"],
};
