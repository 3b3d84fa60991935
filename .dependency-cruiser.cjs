// The arrows of docs/architecture.md: what each package may import of the others. Nothing else may.
const MAY_IMPORT = {
  interface: [],
  topology: ["interface"],
  plan: ["interface", "topology"],
  nixl: ["interface"],
  "transport-memory": ["interface"],
  conformance: ["interface"],
  connector: ["interface", "topology", "plan"],
  pull: ["interface", "topology", "plan", "connector"],
  push: ["interface", "topology", "plan", "connector"],
  neuron: ["interface"],
  fleet: ["interface"],
  proxy: ["interface", "fleet"],
  peer: ["interface", "topology", "plan", "connector", "pull", "push", "nixl"],
};
const PURE = ["interface", "topology", "plan", "transport-memory"];
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
      name: "packages-never-import-apps-or-tools",
      severity: "error",
      from: { path: "^packages/[^/]+/src/" },
      to: { path: "^(apps|tools|bench)/" },
    },
    {
      name: "pure-packages-have-no-node-builtins",
      severity: "error",
      from: { path: `^packages/(${PURE.join("|")})/src/(?!.*\\.test\\.ts$|cli\\.ts$|cli/)` },
      to: { dependencyTypes: ["core"] },
    },
    {
      name: "no-cycles",
      severity: "error",
      from: {},
      to: { circular: true, dependencyTypesNot: ["type-only"] },
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
