// npm test [-- FILE…]: set-up, then every check of the repository, then the suites. With FILE only set-up and those tests. The last line counts
// all of them. What it leaves out (scripts/suites.mjs) CI runs.
import { spawn, spawnSync } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, relative } from "node:path";
import { pages, vale } from "./go-linters.mjs";
import { hasGo } from "./go-tools.mjs";
import { checkPages, PAGES } from "./named-tests.mjs";
import { selftest } from "./nixl-selftest.mjs";
import { root, run, setup } from "./setup.mjs";
import { BY_INPUTS, CHECKS, isWhole, LONG, PassedFiles, patternsOf, SYSTEMS } from "./suites.mjs";
import { checkCommands } from "./vllm-documents.mjs";

const bin = (name) => join(root, "node_modules", ".bin", name);
const tsc = join(root, "node_modules/typescript-7/bin/tsc");
/** The exit code of scripts/lint-deploy.mjs without its linters. */
const NOT_FETCHED = 3;
let passed = 0;
/** What failed: printed once more at the end, where it is found. */
const failures = [];

function fail(name, message) {
  failures.push(name);
  console.log(`FAIL  ${name}\n${message}`);
}

async function check(name, work) {
  const begun = Date.now();
  try {
    await work();
    passed += 1;
    console.log(`ok    ${name} (${((Date.now() - begun) / 1000).toFixed(1)} s)`);
  } catch (error) {
    fail(name, error.message ?? error);
  }
}

/** Runs vitest with its report on the terminal, and adds its counts. */
async function suites(args, leftOut = []) {
  const folder = mkdtempSync(join(tmpdir(), "kv-test-"));
  const report = join(folder, "report.json");
  const reporters = ["--reporter=default", "--reporter=json", `--outputFile.json=${report}`];
  const KV_LEFT_OUT = leftOut.length === 0 ? undefined : patternsOf(leftOut).join(",");
  const code = await new Promise((resolve) => {
    spawn(bin("vitest"), ["run", ...reporters, ...args], {
      cwd: root,
      stdio: ["ignore", "inherit", "inherit"],
      env: { ...process.env, KV_LEFT_OUT },
    }).on("close", resolve);
  });
  if (!existsSync(report)) {
    return fail("vitest", `it ended with ${code} and wrote no report`);
  }
  const result = JSON.parse(readFileSync(report, "utf8"));
  rmSync(folder, { recursive: true });
  passed += result.numPassedTests;
  const before = failures.length;
  for (const file of result.testResults) {
    const path = relative(root, file.name);
    const tests = file.assertionResults.filter((test) => test.status === "failed");
    for (const test of tests) fail(`${path}: ${test.fullName}`, test.failureMessages.join("\n"));
    if (file.status === "failed" && file.assertionResults.length === 0)
      fail(path, `it could not be loaded: ${file.message}`);
  }
  if (code !== 0 && failures.length === before)
    fail("vitest", `it ended with ${code} although no test failed: an error outside a test`);
  const skipped = result.testResults.flatMap((file) =>
    file.assertionResults.filter((test) => test.status !== "passed" && test.status !== "failed"),
  );
  // With CI=true a test that needs NIXL fails instead of being skipped. The rest are optional capabilities, each listed by name.
  for (const test of skipped) console.log(`SKIPPED  ${test.fullName}`);
  if (args.length > 0) return;
  await check("the vitest commands of docs/vllm-documents.md", async () => checkCommands(result));
  await check(`the tests that ${PAGES.join(" and ")} name`, async () => checkPages(result));
  if (isWhole) await check("every test file has run", async () => checkFiles(result));
}

/** vitest.config.ts gives each test file to one project, so a wrong pattern there can give a file to none. */
function checkFiles(result) {
  const list = spawnSync("git", ["ls-files", "-co", "--exclude-standard", "*.test.ts"], {
    cwd: root,
    encoding: "utf8",
  });
  if (list.status !== 0) throw new Error(`git ls-files failed: ${list.stderr}`);
  const ran = new Set(result.testResults.map((file) => relative(root, file.name)));
  const missing = list.stdout.split("\n").filter((path) => path !== "" && !ran.has(path));
  if (missing.length > 0) throw new Error(`no project of vitest.config.ts runs\n${missing.join("\n")}`);
}

async function lintDeploy() {
  const script = join(root, "scripts/lint-deploy.mjs");
  const child = spawn(process.execPath, inCi && hasGo() ? [script] : [script, "--if-ready"], {
    cwd: root,
    stdio: ["ignore", "pipe", "pipe"],
  });
  const output = [];
  for (const stream of [child.stdout, child.stderr]) stream.on("data", (chunk) => output.push(chunk));
  const status = await new Promise((resolve) => child.on("close", resolve));
  if (status === NOT_FETCHED) {
    unchanged.skipped(deploy.name);
    console.log("SKIPPED  its linters are missing: npm run lint:deploy fetches them");
  } else if (status !== 0) throw new Error(Buffer.concat(output).toString());
}

/** Checks the types of one program. What tsc knows of files that have not changed it keeps from run to run; CI begins anew. */
function types(project, name) {
  const kept = join(root, "node_modules/.cache/kv-tsc", `${name}.tsbuildinfo`);
  const args = isWhole ? [] : ["--incremental", "--tsBuildInfoFile", kept];
  return run(process.execPath, [tsc, "--noEmit", "-p", project, ...args]);
}

const only = process.argv.slice(2);
const inCi = process.env.CI === "true";
const unchanged = new PassedFiles();
const [deploy] = CHECKS;
await check("set-up", async () => {
  const { nixl } = await setup();
  if (!nixl.ready && inCi) throw new Error(`CI needs NIXL: ${nixl.why}`);
  if (nixl.noLibfabric && inCi) throw new Error(`CI needs both backends: ${nixl.noLibfabric}`);
});
if (only.length === 0) {
  // The suites load the platform package's addon when it is there: in CI they run with what is published.
  const built = "kv-nixl selftest, with the addons and libraries that are published";
  if (inCi) await check(built, selftest);
  else console.log(`SKIPPED  ${built}: npm run kv-nixl -- selftest`);
  await Promise.all([
    check("lint (biome)", () => run(bin("biome"), ["check", "--error-on-warnings", "."])),
    check("types (tsc)", async () => {
      await types("tsconfig.json", "sources");
      await types("examples", "examples");
      // The page runs in a browser: it has other globals.
      await types("packages/kv-plan/page", "page");
    }),
    check("directions of dependencies", () =>
      run(bin("depcruise"), ["--config", ".dependency-cruiser.cjs", "packages", "apps"]),
    ),
    check("nothing unused (knip)", () => run(bin("knip"), [])),
    unchanged.of(deploy.name) ? console.log(`UNCHANGED  ${deploy.name}`) : check(deploy.name, lintDeploy),
  ]);
  const proseLinter = inCi && hasGo() ? await vale.fetch() : vale.find();
  if (proseLinter === undefined)
    console.log("SKIPPED  prose (vale): it is missing: npm run lint:prose fetches it");
  else await check("prose (vale)", () => run(proseLinter, ["--output=line", ...pages()]));
  if (unchanged.of("release")) console.log("UNCHANGED  packed packages (publint, attw)");
  else
    await check("packed packages (publint, attw)", () =>
      run(process.execPath, [join(root, "scripts/check-packages.mjs")]),
    );
  const sanitized = "the addon with ASan and UBSan";
  const script = join(root, "scripts/test-sanitize.mjs");
  if (inCi) await check(sanitized, () => run(process.execPath, [script, "--short"], { show: true }));
  else console.log(`SKIPPED  ${sanitized}: npm run test:sanitize`);
}
const leftOut = [];
if (only.length === 0) {
  if (!isWhole) {
    console.log(`LEFT OUT  ${LONG.length} suites of the whole run: npm run test:long -- --only whole`);
    leftOut.push(...LONG.map(([suite]) => suite));
  }
  for (const [isUnchanged, suites] of [
    ...BY_INPUTS.map(({ name, suites }) => [unchanged.of(name), suites]),
    [unchanged.all, SYSTEMS],
  ]) {
    if (!isUnchanged) continue;
    console.log(`UNCHANGED  ${suites.join(", ")}`);
    leftOut.push(...suites);
  }
}
await suites(only, leftOut);
if (only.length === 0 && failures.length === 0) unchanged.passed();
for (const name of failures) console.log(`FAILED  ${name}`);
console.log(`${passed} passed, ${failures.length} failed`);
process.exitCode = failures.length === 0 ? 0 : 1;
