import { readdirSync } from "node:fs";
import { entryPoints } from "../bundle/tsup.config.mjs";

const foldersIn = (folder) =>
  readdirSync(folder, { withFileTypes: true })
    .filter((entry) => entry.isDirectory())
    .map(({ name }) => name);

/** The packages: what is built from, and the tests. */
const packages = Object.fromEntries(
  foldersIn("packages").map((name) => [
    `packages/${name}`,
    {
      entry: [
        ...Object.values(entryPoints(`packages/${name}`)),
        "test/**/*.ts",
        "src/**/*.test.ts",
      ],
      project: ["src/**/*.ts", "test/**/*.ts"],
    },
  ]),
);

/** The folders of tools/ whose files are all begun by somebody: programs and what tests share. */
const workshop = foldersIn("tools").filter(
  (name) => !["bench", "node_modules", "testing"].includes(name),
);

export default {
  workspaces: {
    ...packages,
    "packages/kv-plan": {
      entry: [
        ...packages["packages/kv-plan"].entry,
        "page/{planner,report-page,build}.ts",
        "page/*.test.ts",
      ],
      project: ["src/**/*.ts", "test/**/*.ts", "page/*.ts"],
    },
    "apps/demo": {
      entry: [...Object.values(entryPoints("apps/demo")), "test/**/*.ts"],
      project: ["src/**/*.ts", "test/**/*.ts"],
    },
    ".": { entry: [], project: ["*.ts"], stryker: { config: "tools/mutate/stryker.config.mjs" } },
    native: {
      entry: ["scripts/build-*.mjs"],
      ignoreDependencies: ["node-addon-api", "node-api-headers"],
    },
    examples: {
      entry: ["*.mjs"],
      project: ["*.mjs"],
    },
    tools: {
      entry: [
        ...workshop.map((name) => `${name}/**/*.{ts,mjs,cjs,js}`),
        "bench/*.mjs",
        "bench/{main,proxy-upstream,turn-upstream}.ts",
        "bench/{growth/*,nixl/target}.ts",
        "bench/**/*.test.ts",
      ],
      project: ["**/*.{ts,mjs,cjs,js}", "!testing/**"],
    },
    "tools/testing": {
      entry: ["src/**/*.ts"],
      project: ["src/**/*.ts"],
    },
  },
  exclude: ["types", "duplicates"],
  ignoreBinaries: [
    "apt-get",
    "dpkg",
    "dpkg-deb",
    "ip",
    "nvidia-smi",
    "openssl",
    "prlimit",
    "readelf",
    "ss",
    "taskset",
    "systemd-analyze",
    "unshare",
  ],
  // setup.mjs and turbo run it.
  ignoreDependencies: ["@kv/testing", "pnpm"],
};
