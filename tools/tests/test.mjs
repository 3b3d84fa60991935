// npm test [-- FILE…]: set-up, then turbo runs every check and suite whose inputs have changed
// since they passed. With FILE only set-up and those tests. The last line counts what ran; what
// came from the cache is counted before it. CI runs everything, in its long form, with an empty
// cache.
import { spawnSync } from "node:child_process";
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, statSync } from "node:fs";
import { tmpdir } from "node:os";
import { delimiter, dirname, join, relative } from "node:path";
import { checkPages, isLongRun, PAGES } from "../docs/named-tests.mjs";
import { checkCommands } from "../docs/vllm-documents.mjs";
import { selftest } from "../nixl/selftest.mjs";
import { findVale } from "../prose/lint-prose.mjs";
import { hasGo } from "../setup/go-tools.mjs";
import { root, run, runInTerminal, setup, turboInTerminal, vitest } from "../setup/setup.mjs";

const inCi = process.env.CI === "true";
const CHECKS = ["lint", "typecheck", "lint:imports", "lint:unused"];
const SUITES = ["test", "test:repository"];
/** CI's own limit is 90 minutes, and ends a run without a word about what hangs. */
const CI_LIMIT_MS = 80 * 60_000;
/** Programs that some tests need, and are skipped by name without. */
const PROGRAMS = ["chromium", "prometheus", "promtool", "go", "python3", "ip", "unshare"];

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

/** What a test may find on this machine: a result is from the cache only where this is the same. */
function machine({ ready, why, noLibfabric }) {
  const folders = (process.env.PATH ?? "").split(delimiter);
  const found = PROGRAMS.filter((name) => folders.some((folder) => existsSync(join(folder, name))));
  return [process.version, ready ? "NIXL" : why, noLibfabric ?? "LIBFABRIC", ...found].join("; ");
}

/** The report of the suite that a task of turbo ran. */
const reportOf = ({ directory, task }) => join(root, directory, `.turbo/report-${task}.json`);

/**
 * Runs tasks of turbo, and adds what they counted. Returns the reports of all suites, those from
 * the cache too.
 */
async function runTasks(tasks, env) {
  const begun = Date.now();
  const runs = join(root, ".turbo/runs");
  rmSync(runs, { recursive: true, force: true });
  const flags = [
    "--continue=dependencies-successful",
    "--summarize",
    "--output-logs=new-only",
    "--concurrency=2",
  ];
  const rest = inCi ? Math.round(CI_LIMIT_MS - performance.now()) : undefined;
  const late = inCi ? setTimeout(() => showWhatRuns(begun), rest - 1_000) : undefined;
  const code = await turboInTerminal([...tasks, ...flags], env, rest);
  clearTimeout(late);
  const [summary] = existsSync(runs) ? readdirSync(runs) : [];
  if (summary === undefined) {
    fail("turbo", `it ended with ${code} and wrote no summary`);
    return [];
  }
  const { tasks: ran } = JSON.parse(readFileSync(join(runs, summary), "utf8"));
  const cached = { checks: 0, tests: 0 };
  const reports = [];
  for (const task of ran.filter(({ task: name }) => tasks.includes(name))) {
    const isCached = task.cache.status === "HIT";
    if (SUITES.includes(task.task)) {
      if (task.command === "<NONEXISTENT>") continue;
      // One of an earlier run is not the report of a task that could not begin.
      const isReport =
        existsSync(reportOf(task)) && (isCached || statSync(reportOf(task)).mtimeMs >= begun);
      if (!isReport) {
        fail(task.taskId, `it ended with ${task.execution?.exitCode} and wrote no report`);
        continue;
      }
      const report = JSON.parse(readFileSync(reportOf(task), "utf8"));
      reports.push(report);
      if (isCached) cached.tests += report.numPassedTests;
      else count(report, task);
    } else if (isCached) cached.checks += 1;
    else if (task.execution?.exitCode === 0) passed += 1;
    else fail(task.taskId, `it ended with ${task.execution?.exitCode}: its output is above`);
  }
  if (code !== 0 && failures.length === 0) fail("turbo", `it ended with ${code}`);
  if (cached.tests + cached.checks > 0)
    console.log(
      `FROM THE CACHE  ${cached.tests} tests and ${cached.checks} checks, which passed with the same inputs`,
    );
  return reports;
}

/** Prints the processes, and the last lines of the suites that have no report yet. */
function showWhatRuns(begun) {
  const columns = ["-eo", "pid,ppid,etimes,stat,args", "--forest"];
  console.log(spawnSync("ps", columns, { encoding: "utf8" }).stdout);
  for (const directory of gitFiles("*package.json").map(dirname))
    for (const task of SUITES) {
      const log = join(root, directory, `.turbo/turbo-${task.replaceAll(":", "$colon$")}.log`);
      const report = reportOf({ directory, task });
      const runs = existsSync(log) && statSync(log).mtimeMs >= begun && !existsSync(report);
      if (runs)
        fail(`${directory} ${task}`, readFileSync(log, "utf8").split("\n").slice(-30).join("\n"));
    }
}

/** Adds the counts of a report of vitest. */
function count({ numPassedTests, testResults }, { taskId, execution }) {
  passed += numPassedTests;
  const before = failures.length;
  for (const file of testResults) {
    const path = relative(root, file.name);
    for (const test of file.assertionResults) {
      if (test.status === "failed")
        fail(`${path}: ${test.fullName}`, test.failureMessages.join("\n"));
      // With CI=true a test that needs NIXL fails instead of being skipped. The rest are optional
      // capabilities, each listed by name.
      else if (test.status !== "passed") console.log(`SKIPPED  ${test.fullName}`);
    }
    if (file.status === "failed" && file.assertionResults.length === 0)
      fail(path, `it could not be loaded: ${file.message}`);
  }
  if (execution.exitCode !== 0 && failures.length === before)
    fail(
      taskId,
      `it ended with ${execution.exitCode} although no test failed: an error outside a test`,
    );
}

const gitFiles = (pattern) => {
  const { status, stdout, stderr } = spawnSync(
    "git",
    ["ls-files", "-co", "--exclude-standard", pattern],
    {
      cwd: root,
      encoding: "utf8",
    },
  );
  if (status !== 0) throw new Error(`git ls-files failed: ${stderr}`);
  return stdout.split("\n").filter((path) => path !== "");
};

/**
 * Each test file belongs to one package, and to one project of vitest.config.ts: a wrong pattern
 * can give a file to none.
 */
function checkFiles({ testResults }) {
  const ran = new Set(testResults.map((file) => relative(root, file.name)));
  // tools/docs/how-to.long.test.ts runs those of examples in projects of their own.
  const missing = gitFiles("*.test.ts").filter(
    (path) => !ran.has(path) && !path.startsWith("examples/") && (isLongRun || !isLongSuite(path)),
  );
  if (missing.length > 0) throw new Error(`no task of turbo runs\n${missing.join("\n")}`);
}

const isLongSuite = (path) => path.endsWith(".long.test.ts");

const only = process.argv.slice(2);
// Set-up, too, begins without a cache. Tests that start turbo find what set-up has built.
const emptyCache = inCi ? mkdtempSync(join(tmpdir(), "kv-turbo-")) : undefined;
if (emptyCache !== undefined) process.env.TURBO_CACHE_DIR = emptyCache;
let nixl = { ready: false, why: "set-up failed" };
await check("set-up", async () => {
  ({ nixl } = await setup());
  if (!nixl.ready && inCi) throw new Error(`CI needs NIXL: ${nixl.why}`);
  if (nixl.noLibfabric && inCi) throw new Error(`CI needs both backends: ${nixl.noLibfabric}`);
});
if (only.length > 0) {
  process.exitCode = await runInTerminal(vitest, ["run", ...only]);
} else {
  const tasks = [...CHECKS, ...SUITES];
  // It imports what set-up has installed.
  const { hasDeployLinters } = await import("../deploy/lint-deploy.mjs");
  const mayFetch = inCi && hasGo();
  for (const [name, isReady] of [
    ["lint:deploy", mayFetch || hasDeployLinters()],
    ["lint:prose", mayFetch || findVale() !== undefined],
  ]) {
    if (isReady) tasks.push(name);
    else console.log(`SKIPPED  ${name}: what it runs is missing: npm run ${name} fetches it`);
  }
  if (isLongRun) tasks.push("lint:packages");
  else console.log("LEFT OUT  lint:packages: npm run lint:packages");
  if (inCi) {
    // The suites load the platform package's addon when it is there: in CI they run with what is
    // published.
    await check("kv-nixl selftest, with the addons and libraries that are published", selftest);
    await check("the addon with ASan and UBSan", () =>
      run(process.execPath, [join(root, "tools/nixl/test-sanitize.mjs"), "--short"], {
        show: true,
      }),
    );
  } else {
    console.log("SKIPPED  kv-nixl selftest: npm run kv-nixl -- selftest");
    console.log("SKIPPED  the addon with ASan and UBSan: npm run test:sanitize");
    for (const path of gitFiles("*.long.test.ts"))
      console.log(`LEFT OUT  ${path}: npm run test:long -- --only whole`);
  }
  const reports = await runTasks(tasks, { KV_MACHINE: machine(nixl) });
  const report = { testResults: reports.flatMap(({ testResults }) => testResults) };
  await check("the vitest commands of docs/vllm-documents.md", async () => checkCommands(report));
  await check(`the tests that ${PAGES.join(" and ")} name`, async () => checkPages(report));
  await check("every test file has run", async () => checkFiles(report));
  for (const name of failures) console.log(`FAILED  ${name}`);
  console.log(`${passed} passed, ${failures.length} failed`);
  process.exitCode = failures.length === 0 ? 0 : 1;
}
if (emptyCache !== undefined) rmSync(emptyCache, { recursive: true, force: true });
