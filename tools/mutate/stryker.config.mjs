// The configuration of Stryker, which tools/mutate/mutate.mjs starts: it changes the code one place
// at a time, and a test must fail for each change.
import { fileURLToPath } from "node:url";

const { KV_MUTATE_FILES = "[]", KV_MUTATE_TESTS = "", KV_MUTATE_REPORT } = process.env;

export default {
  mutate: [...JSON.parse(KV_MUTATE_FILES), "!**/*.test.ts", "!**/index.ts"],
  testRunner: "vitest",
  plugins: [
    "@stryker-mutator/vitest-runner",
    fileURLToPath(new URL("mutation-sample.mjs", import.meta.url)),
  ],
  ignorers: ["sample"],
  // Tests that are named are taken as related, also where they import a file through the index,
  // which Stryker does not resolve.
  vitest: { configFile: "tools/mutate/vitest.config.ts", related: KV_MUTATE_TESTS === "" },
  coverageAnalysis: "perTest",
  // Texts and details of errors are not mutated.
  mutator: { excludedMutations: ["StringLiteral", "ObjectLiteral"] },
  reporters: ["clear-text", "progress-append-only", "json"],
  clearTextReporter: {
    allowColor: false,
    reportTests: false,
    logTests: false,
    reportMutants: false,
  },
  jsonReporter: { fileName: KV_MUTATE_REPORT },
  tempDirName: "build/stryker",
  inPlace: false,
  // A mutant of code that runs when a module is loaded (constants) would need the whole suite.
  ignoreStatic: true,
  // Long enough that a busy machine is not mistaken for an endless loop. The tests beside a file
  // take a second.
  timeoutMS: KV_MUTATE_TESTS === "" ? 90_000 : 10_000,
  timeoutFactor: 2,
  ignorePatterns: [
    "native",
    "apps/*/{src,test,dist}",
    "docs",
    "packages/*/dist",
    "build",
    ".turbo",
  ],
  disableTypeChecks: false,
  allowEmpty: false,
};
