// npm run mutate: changes the mapping, the descriptors and the receive pass one place at a time; a test must fail for each.
const MUTATED = [
  "packages/topology/src/*.ts",
  "packages/plan/src/{block-ids,descriptor-ids,engine-plan,pair-blocks,receive-pass,receive-pass-of,region-rows,request-plan,run-order}.ts",
];

export default {
  mutate: [...MUTATED, "!**/*.test.ts", "!**/index.ts"],
  testRunner: "vitest",
  plugins: ["@stryker-mutator/vitest-runner"],
  vitest: { configFile: "vitest.mutate.config.ts", related: true },
  coverageAnalysis: "perTest",
  // What an error says is not what it decides.
  mutator: { excludedMutations: ["StringLiteral", "ObjectLiteral"] },
  reporters: ["clear-text", "progress-append-only", "json"],
  clearTextReporter: { allowColor: false, reportTests: false, logTests: false },
  jsonReporter: { fileName: "build/mutation.json" },
  tempDirName: "build/stryker",
  inPlace: false,
  concurrency: 2,
  timeoutMS: 20_000,
  ignorePatterns: ["native", "apps", "docs", "packages/*/dist", "build", ".turbo"],
  disableTypeChecks: false,
  allowEmpty: false,
};
