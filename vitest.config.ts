import { fileURLToPath } from "node:url";
import { configDefaults, defineConfig } from "vitest/config";
import { isWhole } from "./scripts/suites.mjs";

const packages = fileURLToPath(new URL("./packages", import.meta.url));

// `vitest related FILE` and `vitest watch` run what an edit may have broken, in seconds. These suites run whole systems for minutes and are
// related to almost every file: they run in `npm test`, or when they are named.
const WHOLE_SYSTEMS = [
  "apps/demo/test/**",
  "tools/envoy/**",
  "tools/faults/**",
  "packages/neuron/**/faults.test.ts",
  "**/faults-bite.test.ts",
  "**/isolation-property.test.ts",
  "packages/peer/test/load.test.ts",
  "tools/docs/commands.test.ts",
  "tools/docs/how-to.test.ts",
  "tools/docs/vllm-documents.test.ts",
  "tools/site/**",
  "bench/push-vs-pull/links/links.test.ts",
];
const [, , command, ...args] = process.argv;
const named = args.some((arg) => !arg.startsWith("-"));
const afterAnEdit = command === "related" || (command === "watch" && !named);

/** `npm test` leaves these out. */
const leftOut = process.env["KV_LEFT_OUT"]?.split(",") ?? [];
const EXCLUDED = [...configDefaults.exclude, "build/**", ...leftOut, ...(afterAnEdit ? WHOLE_SYSTEMS : [])];
/** Tests whose modules keep nothing from one file to the next: the files of a worker share them. That takes half of the time. */
const SHARED = [
  ...["interface", "plan", "protocol", "topology", "transport-memory"].map(
    (name) => `packages/${name}/**/*.test.ts`,
  ),
  "packages/{connector,epp,fleet,http,kv-plan,neuron,peer,program,proxy,pull,push,side-channel,testing}/src/**/*.test.ts",
  // The other folders of @kv/nixl mock modules, or what the machine has.
  "packages/nixl/src/!(addon|backends|doctor|library)/**/*.test.ts",
  "packages/{connector,epp,fleet,http,pull,push,proxy,side-channel}/test/**/*.test.ts",
];

/** The demo's tests take the packages as they are built: each of its files loads all of them. After an edit they take the sources. */
const BUILT = afterAnEdit ? [] : ["apps/demo/**/*.test.ts"];

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
    include: BUILT,
    exclude: EXCLUDED,
    server: { deps: { external: [/\/packages\/[a-z-]+\/dist\//] } },
  },
};

export default defineConfig({
  resolve: {
    alias: [
      {
        find: /^@kv\/(conformance|connector|fleet|testing)\/(.+)$/,
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
        test: { name: "shared", include: SHARED, exclude: EXCLUDED, isolate: false },
      },
      {
        extends: true,
        test: { name: "alone", include: ["**/*.test.ts"], exclude: [...EXCLUDED, ...SHARED, ...BUILT] },
      },
      ...(BUILT.length === 0 ? [] : [builtProject]),
    ],
    // Fault runs have fewer requests than their 1,000.
    env: isWhole ? {} : { KV_REQUESTS: process.env["KV_REQUESTS"] ?? "400" },
    globalSetup: "scripts/vitest-setup.mjs",
    testTimeout: 60_000,
    hookTimeout: 60_000,
    // The default of 1 s is less than a busy machine may need.
    expect: { poll: { timeout: 30_000 } },
    // Some tests wait for a timeout or a process: with a third worker two cores are busy.
    maxWorkers: isWhole ? 2 : 3,
  },
});
