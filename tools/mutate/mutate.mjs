// npm run mutate [-- --only AREA,… | --mutate FILE,…] [--raise]: mutation tests (Stryker),
// docs/design/mutation.md. Without --mutate, a sample of the mutants of each area, whose score may
// not be below tools/mutate/mutation-floors.json; --raise writes a better score there.
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { join, relative } from "node:path";
import { parseArgs } from "node:util";
import { root, runInTerminal } from "../setup/setup.mjs";

/** Tests of whole requests between P and D, in memory: a second or two for each file. */
const REQUESTS = "packages/{pull,push}/test/{scenarios,traces}.test.ts";
/**
 * What is mutated, by which tests it is judged, and one of how many statements is in the sample.
 * Left out: texts, metrics and settings.
 */
const AREAS = {
  topology: {
    files: "packages/topology/src/*.ts",
    tests: ["packages/topology/{src,test}/**/*.test.ts"],
    sample: 2,
  },
  plan: {
    files: "packages/plan/src/{engine,kinds,request}/*.ts",
    tests: [
      "packages/plan/src/{engine,kinds,request}/*.test.ts",
      "packages/plan/test/{bytes/kinds-move-the-right-bytes,prove/proof,vectors}.test.ts",
    ],
    sample: 40,
  },
  connector: {
    files: "packages/connector/src/{handshake,peers,requests,scheduler,staging,worker}/*.ts",
    tests: [
      "packages/connector/src/**/*.test.ts",
      // What its callers see of it.
      "packages/{pull,push}/src/*.test.ts",
      "packages/{pull,push}/test/sleep-mode.test.ts",
      "packages/pull/test/{engine-input,isolation}.test.ts",
      "packages/neuron/test/staging-in-steps.test.ts",
      REQUESTS,
    ],
    sample: 12,
  },
  pull: {
    files: "packages/pull/src/*.ts",
    tests: [
      "packages/pull/src/*.test.ts",
      "packages/pull/test/{scenarios,sleep-mode,traces}.test.ts",
    ],
    sample: 2,
  },
  push: {
    files: "packages/push/src/**/*.ts",
    tests: [
      "packages/push/src/**/*.test.ts",
      "packages/push/test/{counterparts/*,cache-kinds,golden,layerwise}.test.ts",
      "packages/push/test/{scenarios,sleep-mode,traces,transfer-id}.test.ts",
    ],
    sample: 6,
  },
  routing: {
    // The pool of instances is judged by tests of its own.
    files: "packages/fleet/src/routing/!(instance-pool).ts",
    tests: ["packages/fleet/src/{instances,kv-events,routing}/*.test.ts"],
    sample: 2,
  },
};
const FLOORS = join(root, "tools/mutate/mutation-floors.json");
/** What counts as found. A mutant that ends in an endless loop is. */
const FOUND = new Set(["Killed", "Timeout"]);
const ALIVE = new Set(["Survived", "NoCoverage"]);

const { values } = parseArgs({
  options: {
    only: { type: "string", default: Object.keys(AREAS).join() },
    mutate: { type: "string" },
    raise: { type: "boolean", default: false },
    concurrency: { type: "string", default: "2" },
    help: { type: "boolean", default: false },
  },
});

if (values.help) {
  console.log(
    `npm run mutate [-- --only AREA,… | --mutate FILE,…] [--raise] [--concurrency N]\nareas: ${Object.keys(AREAS).join(", ")}`,
  );
} else if (values.mutate === undefined) {
  const floors = JSON.parse(readFileSync(FLOORS, "utf8"));
  for (const name of values.only.split(",")) {
    const area = AREAS[name];
    if (area === undefined) throw new Error(`no area ${name}: ${Object.keys(AREAS).join(", ")}`);
    const floor = floors[name];
    const begunMs = Date.now();
    const code = await stryker([area.files], {
      tests: area.tests,
      sample: area.sample,
      report: name,
    });
    const { score, found, alive } = code === 0 ? scoreOf(name) : { score: 0, found: 0, alive: [] };
    const minutes = ((Date.now() - begunMs) / 60_000).toFixed(1);
    console.log(
      `${name}: ${score} % (${found} of ${found + alive.length} mutants) in ${minutes} min, floor ${floor} %`,
    );
    if (code !== 0 || score < floor) {
      process.exitCode = 1;
      console.log(
        `${name} is below its floor. A test must fail for each of these:\n${alive.join("\n")}`,
      );
    } else if (values.raise && score > floor) {
      floors[name] = score;
      writeFileSync(FLOORS, `${JSON.stringify(floors, undefined, 2)}\n`);
    }
  }
} else {
  const files = values.mutate.split(",").map((file) => file.replace(/:.*$/, ""));
  process.exitCode = await stryker(values.mutate.split(","), {
    tests: ownTests(files),
    sample: 1,
    report: "files",
  });
  if (process.exitCode === 0) console.log(scoreOf("files").alive.join("\n"));
}

/** Runs Stryker, and resolves with its exit code. Its report is `build/mutation-REPORT.json`. */
function stryker(mutated, { tests, sample, report }) {
  const args = ["run", "tools/mutate/stryker.config.mjs", "--concurrency", values.concurrency];
  return runInTerminal(join(root, "node_modules/.bin/stryker"), args, {
    KV_MUTATE_FILES: JSON.stringify(mutated),
    KV_MUTATE_TESTS: tests.join(";"),
    ...process.env,
    KV_MUTATE_SAMPLE: String(sample),
    KV_MUTATE_REPORT: `build/mutation-${report}.json`,
  });
}

/**
 * The tests of some files: those of their area, where it is one. With KV_MUTATE_SCOPE: none, and
 * tools/mutate/vitest.config.ts has the tests.
 */
function ownTests(files) {
  if (process.env.KV_MUTATE_SCOPE !== undefined) return [];
  const area = Object.values(AREAS).find((each) =>
    files.every((file) => file.startsWith(each.files.replace(/[{*].*$/, ""))),
  );
  if (area !== undefined) return area.tests;
  const tests = files.map((file) => file.replace(/\.ts$/, ".test.ts"));
  return tests.every((file) => existsSync(join(root, file))) ? tests : [];
}

/** What a report says of its area, rounded down to a tenth of a percent. */
function scoreOf(report) {
  const { files } = JSON.parse(readFileSync(join(root, `build/mutation-${report}.json`), "utf8"));
  let found = 0;
  const alive = [];
  for (const [file, { mutants }] of Object.entries(files)) {
    for (const { status, location, mutatorName, replacement } of mutants) {
      if (FOUND.has(status)) found += 1;
      if (!ALIVE.has(status)) continue;
      const { line, column } = location.start;
      const change = `${mutatorName} to ${String(replacement).replace(/\s+/g, " ").slice(0, 80)}`;
      alive.push(`${relative(root, join(root, file))}:${line}:${column} ${status}: ${change}`);
    }
  }
  return { score: Math.floor((1000 * found) / (found + alive.length)) / 10, found, alive };
}
