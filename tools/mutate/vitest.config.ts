import { fileURLToPath } from "node:url";
import { defineConfig, mergeConfig } from "vitest/config";
import { BaseSequencer, type TestSpecification } from "vitest/node";
import shared from "../../vitest.config.js";

const scope = process.env["KV_MUTATE_SCOPE"];
const own = (process.env["KV_MUTATE_TESTS"] ?? "").split(";").filter((file) => file !== "");

const ALL = [
  "packages/topology/{src,test}/**/*.test.ts",
  "packages/plan/src/{engine,kinds,request}/*.test.ts",
  "packages/plan/test/{bytes/kinds-move-the-right-bytes,vectors}.test.ts",
  // Proofs of random pairs take as long as all the others: for the mutants that those let live.
  ...(scope === "proofs" ? ["packages/plan/test/prove/proof.test.ts"] : []),
];

/**
 * A mutant's run ends with the first failing test: unit tests run first, tests that move bytes
 * last.
 */
class UnitsFirst extends BaseSequencer {
  override async sort(files: TestSpecification[]): Promise<TestSpecification[]> {
    const late = ({ moduleId }: TestSpecification) => Number(moduleId.includes("/test/"));
    return [...files].sort((one, other) => late(one) - late(other));
  }
}

// The tests that judge a mutated mapping or plan, for `npm run mutate`. Properties draw a tenth of
// their cases: there are thousands of mutants, and a few cases detect one.
export default mergeConfig(
  // Without the global set-up, which builds the programs: no test here starts one.
  { ...shared, test: { ...shared.test, projects: undefined, globalSetup: [], include: [] } },
  defineConfig({
    test: {
      include: scope === undefined && own.length > 0 ? own : ALL,
      env: { KV_PROPERTY_FACTOR: "0.1", KV_PROPERTY_FIRST: "1" },
      setupFiles: ["../hostile/properties/more-runs.ts", "covered-to-the-end.ts"].map((file) =>
        fileURLToPath(new URL(file, import.meta.url)),
      ),
      bail: 1,
      // A mutant for which a test would wait has failed.
      testTimeout: 8000,
      hookTimeout: 8000,
      sequence: { sequencer: UnitsFirst },
    },
  }),
);
