// npm run mutate: changes the mapping, the descriptors and the receive pass one place at a time; a test must fail for each.
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
  // A file's own tests are related to it, also where they ask through the index, which is not seen.
  vitest: { configFile: "vitest.mutate.config.ts", related: !ownTests },
  coverageAnalysis: "perTest",
  // What an error says is not what it decides.
  mutator: { excludedMutations: ["StringLiteral", "ObjectLiteral"] },
  reporters: ["clear-text", "progress-append-only", "json"],
  clearTextReporter: { allowColor: false, reportTests: false, logTests: false },
  jsonReporter: { fileName: "build/mutation.json" },
  tempDirName: "build/stryker",
  inPlace: false,
  concurrency: 2,
  // What only runs when a module is loaded (constants) takes the whole suite for each mutant, and is seen by every test or by none.
  ignoreStatic: true,
  // Of what a busy machine is slow at, nothing is to be taken for an endless loop; a file's own tests take a second.
  timeoutMS: ownTests ? 20_000 : 90_000,
  timeoutFactor: 2,
  ignorePatterns: ["native", "apps", "docs", "packages/*/dist", "build", ".turbo"],
  disableTypeChecks: false,
  allowEmpty: false,
};
