// The directions of dependencies in docs/architecture.md. tools/repository/dependencies.test.ts shows that these rules bite, and
// finds what they cannot see: a dynamic import whose specifier is a constant.
const MAY_IMPORT = require("./tools/repository/may-import.json");
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
      name: "only-tests-import-testing",
      severity: "error",
      from: {
        path: ["^packages/(?!testing/)[^/]+/src/(?!.*\\.test\\.ts$)", "^apps/[^/]+/src/(?!.*\\.test\\.ts$)"],
      },
      to: { path: "^packages/testing/" },
    },
    {
      name: "packages-never-import-apps-or-tools",
      severity: "error",
      from: { path: "^packages/[^/]+/src/" },
      to: { path: "^(apps|tools|bench)/" },
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
