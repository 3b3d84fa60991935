// The arrows of docs/architecture.md: what each package may import of the others. Nothing else may.
const MAY_IMPORT = {
  interface: [],
  topology: ["interface"],
  plan: ["interface", "topology"],
  nixl: ["interface"],
  "transport-memory": ["interface"],
  conformance: ["interface"],
  protocol: ["interface"],
  connector: ["interface", "protocol", "topology", "plan"],
  pull: ["interface", "protocol", "topology", "plan", "connector"],
  push: ["interface", "protocol", "topology", "plan", "connector"],
  neuron: ["interface"],
  proxy: ["interface", "protocol"],
  peer: ["interface", "protocol", "topology", "plan", "connector", "pull", "push", "nixl"],
};
const PURE = ["interface", "topology", "plan", "transport-memory"];
// Bytes in, values out: hashes and UTF-8 checks are all that these take from Node.
const PURE_WITH_CRYPTO = ["protocol"];
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
      name: "protocol-has-no-node-builtins-but-crypto-and-buffer",
      severity: "error",
      from: { path: `^packages/(${PURE_WITH_CRYPTO.join("|")})/src/(?!.*\\.test\\.ts$)` },
      to: { dependencyTypes: ["core"], pathNot: "^(crypto|buffer)$" },
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
