// npm run mutate: mutates the mapping, the descriptors and the receive pass one place at a time. A test must fail for each mutant.
const MUTATED = [
  "packages/topology/src/*.ts",
  "packages/plan/src/engine/{align-regions,attention-pieces,dcp-replicas,descriptor-tables,engine-plan,group-plans,joint-groups,region-heads,segments,source-plans,transfer-form}.ts",
  "packages/plan/src/request/{dcp-blocks,pair-blocks,request-plan,request-read,runs}.ts",
  "packages/plan/src/receive/*.ts",
  "packages/plan/src/kinds/*.ts",
];

const ownTests = (process.env["KV_MUTATE_TESTS"] ?? "") !== "";

export default {
  mutate: [...MUTATED, "!**/*.test.ts", "!**/index.ts"],
  testRunner: "vitest",
  plugins: ["@stryker-mutator/vitest-runner"],
  // The tests beside a file are taken as related, also where they import it through the index, which Stryker does not resolve.
  vitest: { configFile: "vitest.mutate.config.ts", related: !ownTests },
  coverageAnalysis: "perTest",
  // Texts and details of errors are not mutated.
  mutator: { excludedMutations: ["StringLiteral", "ObjectLiteral"] },
  reporters: ["clear-text", "progress-append-only", "json"],
  clearTextReporter: { allowColor: false, reportTests: false, logTests: false },
  jsonReporter: { fileName: "build/mutation.json" },
  tempDirName: "build/stryker",
  inPlace: false,
  concurrency: 2,
  // A mutant of code that runs when a module is loaded (constants) would need the whole suite.
  ignoreStatic: true,
  // Long enough that a busy machine is not mistaken for an endless loop. The tests beside a file take a second.
  timeoutMS: ownTests ? 20_000 : 90_000,
  timeoutFactor: 2,
  ignorePatterns: ["native", "apps", "docs", "packages/*/dist", "build", ".turbo"],
  disableTypeChecks: false,
  allowEmpty: false,
};
