import { fileURLToPath } from "node:url";
import { configDefaults, defineConfig } from "vitest/config";

const packages = fileURLToPath(new URL("./packages", import.meta.url));
const tools = fileURLToPath(new URL("./tools", import.meta.url));
/** As in tools/testing/src/long-run.ts. */
const isLongRun = process.env["KV_LONG"] === "1" || process.env["CI"] === "true";

// `vitest related FILE` and `vitest watch` run what an edit may have broken, in seconds. These
// suites run whole systems for minutes and are related to almost every file: they run in
// `npm test`, or when they are named.
const WHOLE_SYSTEMS = [
  "**/*.long.test.ts",
  "apps/demo/test/**",
  "tools/envoy/**",
  "**/isolation-property.test.ts",
  "tools/site/**",
];
const [, , command, ...args] = process.argv;
const named = args.some((arg) => !arg.startsWith("-"));
const afterAnEdit = command === "related" || (command === "watch" && !named);

/**
 * A task of turbo, which keeps the report. It leaves out the long suites unless everything runs.
 */
const isTask = process.env["TURBO_HASH"] !== undefined;
const LEFT_OUT = isTask && !isLongRun ? ["**/*.long.test.ts"] : [];
const EXCLUDED = [
  ...configDefaults.exclude,
  "build/**",
  ...LEFT_OUT,
  ...(afterAnEdit ? WHOLE_SYSTEMS : []),
];
/**
 * Tests whose modules keep nothing from one file to the next: the files of a worker share them.
 * That takes half of the time.
 */
const SHARED = [
  ...["interface", "plan", "protocol", "topology", "transport-memory"].map(
    (name) => `packages/${name}/**/*.test.ts`,
  ),
  "packages/{connector,epp,fleet,http,kv-plan,neuron,peer,program,proxy,pull,push,side-channel,tier}/src/**/*.test.ts",
  // The other folders of @kv/nixl mock modules, or what the machine has.
  "packages/nixl/src/!(addon|backends|doctor|library)/**/*.test.ts",
  "packages/{connector,epp,fleet,http,kv-plan,neuron,peer,program,pull,push,proxy,side-channel,tier}/test/**/*.test.ts",
  "tools/!(pack)/**/*.test.ts",
];

/**
 * The demo's tests take the packages as they are built: each of its files loads all of them. After
 * an edit they take the sources. Those of the tier load NIXL, beside which a worker cannot load the
 * stand-in of others.
 */
const BUILT = afterAnEdit ? [] : ["apps/demo/**/!(*tier*).test.ts"];

const builtProject = {
  extends: true as const,
  resolve: {
    alias: [
      { find: /^@kv\/(?!testing)([a-z-]+)$/, replacement: `${packages}/$1/dist/index.js` },
      { find: /^@kv\/(?!testing)([a-z-]+)\/(.+)$/, replacement: `${packages}/$1/dist/$2.js` },
    ],
  },
  test: {
    name: "built",
    isolate: false,
    include: BUILT,
    exclude: EXCLUDED,
    server: { deps: { external: [/\/packages\/[a-z-]+\/dist\//] } },
  },
};

export default defineConfig({
  resolve: {
    alias: [
      { find: /^@kv\/testing\/(.+)$/, replacement: `${tools}/testing/src/$1.ts` },
      {
        find: /^@kv\/(conformance|connector|fleet|nixl|program|protocol)\/(.+)$/,
        replacement: `${packages}/$1/src/$2.ts`,
      },
      { find: /^@kv\/(kv-plan|plan)\/(.+)$/, replacement: `${packages}/$1/src/$2/index.ts` },
      { find: /^@kv\/([a-z-]+)$/, replacement: `${packages}/$1/src/index.ts` },
    ],
  },
  test: {
    projects: [
      {
        extends: true,
        test: {
          name: "shared",
          include: SHARED,
          exclude: EXCLUDED,
          isolate: false,
        },
      },
      {
        extends: true,
        test: {
          name: "alone",
          include: ["**/*.test.ts"],
          exclude: [...EXCLUDED, ...SHARED, ...BUILT],
        },
      },
      ...(BUILT.length === 0 ? [] : [builtProject]),
    ],
    reporters: isTask ? ["default", "json"] : ["default"],
    outputFile: {
      json: `${process.cwd()}/.turbo/report-${process.env["npm_lifecycle_event"]}.json`,
    },
    // Fault runs have fewer requests than their 1,000.
    env: isLongRun ? {} : { KV_REQUESTS: process.env["KV_REQUESTS"] ?? "200" },
    // The suites of many packages have the same modules.
    experimental: { fsModuleCache: !isLongRun },
    globalSetup: "tools/tests/vitest-setup.mjs",
    testTimeout: 60_000,
    hookTimeout: 60_000,
    // The default of 1 s is less than a busy machine may need.
    expect: { poll: { timeout: 30_000 } },
    // Some tests wait for a timeout or a process. turbo runs the suites of two packages at once.
    maxWorkers: isTask ? (isLongRun ? 1 : 2) : 3,
  },
});
