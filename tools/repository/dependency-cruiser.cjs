// The directions of dependencies in docs/architecture.md. tools/repository/dependencies.test.ts
// shows that these rules bite, and finds what they cannot see: a dynamic import whose specifier is
// a constant.
const TIERS = require("./may-import.json");
const MAY_IMPORT = Object.assign({}, ...Object.values(TIERS));
const CORE = Object.keys(TIERS.core).join("|");
/** What the core's tests need of tools/: simulated engines, and the replay of vectors. */
const CORE_TOOLS = "(testing/|conformance/(?!models|family-table|main)[a-z-]+\\.ts$)";
// No `node:` module, so that they run in every JavaScript runtime.
const PURE = ["interface", "topology", "plan", "transport-memory"];
// Tests may import every package.
const source = (name) => `^packages/${name}/src/(?!.*\\.test\\.ts$)`;

module.exports = {
  forbidden: [
    ...Object.entries(MAY_IMPORT).map(([name, allowed]) => ({
      name: `${name}-imports-only-${allowed.join("-") || "nothing"}`,
      severity: "error",
      from: { path: source(name) },
      to: { path: "^packages/", pathNot: `^packages/(${[name, ...allowed].join("|")})/` },
    })),
    {
      name: "core-and-what-its-tests-need-import-core-alone",
      severity: "error",
      from: { path: `^(packages/(${CORE})/|tools/${CORE_TOOLS})` },
      to: { path: `^(apps/|packages/(?!(${CORE})/)|tools/(?!${CORE_TOOLS}))` },
    },
    {
      name: "only-tests-import-tools",
      severity: "error",
      from: { path: "^(packages|apps)/[^/]+/(src|page)/(?!.*\\.test\\.ts$)" },
      to: { path: "^tools/" },
    },
    {
      name: "native-never-imports-tools",
      severity: "error",
      from: { path: "^native/" },
      to: { path: "^tools/" },
    },
    {
      name: "packages-never-import-apps",
      severity: "error",
      from: { path: "^packages/[^/]+/src/" },
      to: { path: "^apps/" },
    },
    {
      name: "pure-packages-have-no-node-builtins",
      severity: "error",
      from: { path: `^packages/(${PURE.join("|")})/src/(?!.*\\.test\\.ts$)` },
      to: { dependencyTypes: ["core"] },
    },
    {
      name: "protocol-has-no-node-builtins-but-crypto-and-buffer",
      severity: "error",
      from: { path: source("protocol") },
      to: { dependencyTypes: ["core"], pathNot: "^(node:)?(crypto|buffer)$" },
    },
    {
      name: "no-cycles",
      severity: "error",
      from: {},
      to: { circular: true },
    },
    {
      name: "sources-never-import-tests",
      severity: "error",
      from: { pathNot: "\\.test\\.ts$" },
      to: { path: "\\.test\\.ts$" },
    },
  ],
  options: {
    doNotFollow: { path: "node_modules" },
    exclude: { path: "(^|/)(dist|node_modules|fixtures)/" },
    tsConfig: { fileName: "tsconfig.json" },
    tsPreCompilationDeps: true,
    enhancedResolveOptions: { exportsFields: ["exports"], conditionNames: ["import", "types"] },
  },
};
