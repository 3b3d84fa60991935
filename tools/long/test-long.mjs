// npm run test:long: the runs that take too long for npm test. The last line counts runs and
// processes.
//   npm run test:long -- --requests 200000 --connectors pull,push --exits 200 --property-factor 50 --mutations 1000000 --seed WORD
//     --addon-requests 5000 --only whole,faults,addon,exits,deaths,descriptors,bundlers,properties,isolation-property,mutations,stream-cuts,growth,restarts,attacks --attacks WORD,WORD --jobs 2
//     --cells WORD,WORD
import { spawn } from "node:child_process";
import { readdirSync } from "node:fs";
import { availableParallelism } from "node:os";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { root, run, setup, vitest } from "../setup/setup.mjs";

const REQUESTS_PER_SEED = 10_000;
/** What runs, in this order. */
const KINDS = {
  whole,
  faults,
  addon,
  properties,
  "isolation-property": isolationProperty,
  mutations: damagedBytes,
  "stream-cuts": streamCuts,
  growth,
  restarts,
  exits: exitsOfProcesses,
  deaths: deathsOfPeers,
  descriptors: fewDescriptors,
  bundlers,
  attacks,
};
/** What a kind has among others, and is not run again after it. */
const PARTS = { properties: ["isolation-property"], whole: ["descriptors", "bundlers"] };
/** Until an attack is ended. The one that runs all floods takes longer. */
const ATTACK_TIMEOUT_MS = 300_000;
const FLOODS_TIMEOUT_MS = 1_800_000;

const { values } = parseArgs({
  options: {
    requests: { type: "string", default: "200000" },
    "addon-requests": { type: "string", default: "5000" },
    connectors: { type: "string", default: "pull,push" },
    exits: { type: "string", default: "200" },
    "property-factor": { type: "string", default: "50" },
    mutations: { type: "string", default: "1000000" },
    seed: { type: "string", default: `${Date.now()}` },
    only: { type: "string", default: Object.keys(KINDS).join(",") },
    attacks: { type: "string", default: "" },
    cells: { type: "string", default: "" },
    jobs: { type: "string", default: `${Math.min(availableParallelism(), 4)}` },
  },
});

function count(name) {
  const value = Number(values[name]);
  if (Number.isSafeInteger(value) && value > 0) return value;
  console.error(`--${name} must be a positive integer, not ${JSON.stringify(values[name])}`);
  process.exit(2);
}
const [requests, addonRequests, exits, propertyFactor, mutations, jobs] = [
  "requests",
  "addon-requests",
  "exits",
  "property-factor",
  "mutations",
  "jobs",
].map(count);
/** The words of a list, all of which must be known. */
function listOf(name, known) {
  const words = values[name].split(",");
  const other = words.find((word) => !known.includes(word));
  if (other === undefined) return words;
  console.error(`--${name} must be of ${known.join(", ")}, not ${JSON.stringify(other)}`);
  process.exit(2);
}
const only = listOf("only", Object.keys(KINDS));
const connectors = listOf("connectors", ["pull", "push"]);

let passed = 0;
let failed = 0;

/**
 * One run. It passes when its command ends with 0; otherwise its output is shown, with the command
 * that replays it.
 */
async function check(name, env, command, args) {
  const begun = Date.now();
  try {
    await run(command, args, { env: { ...process.env, ...env } });
    passed += 1;
    console.log(`ok    ${name} (${((Date.now() - begun) / 1000).toFixed(1)} s)`);
  } catch (error) {
    failed += 1;
    const variables = Object.entries(env).map(([key, value]) => `${key}=${value} `);
    console.log(
      `FAIL  ${name}\n${error.message}\nreplay: ${variables.join("")}${[command, ...args].join(" ")}`,
    );
  }
}

async function faults() {
  const seeds = Array.from({ length: Math.ceil(requests / REQUESTS_PER_SEED) }, (_, i) => i);
  const runNext = async () => {
    for (let i = seeds.shift(); i !== undefined; i = seeds.shift()) {
      const env = {
        KV_SEED: `${values.seed}-${i}`,
        KV_REQUESTS: `${Math.min(REQUESTS_PER_SEED, requests - i * REQUESTS_PER_SEED)}`,
      };
      for (const connector of connectors) {
        const file = `packages/${connector}/test/faults.test.ts`;
        const name = `${connector}: ${env.KV_REQUESTS} requests under faults, seed ${env.KV_SEED}`;
        await check(name, env, vitest, ["run", file]);
      }
    }
  };
  await Promise.all(Array.from({ length: jobs }, runNext));
}

/** All suites in their long form: every pair of a matrix, and all rounds of what repeats. */
async function whole() {
  await check("all suites in their long form", { KV_LONG: "1" }, vitest, ["run"]);
}

/**
 * The fault runs over the addon, with pull and push: on the stand-in for NIXL in one process, and
 * on UCX between processes.
 */
async function addon() {
  const env = { KV_ADDON_REQUESTS: `${addonRequests}`, KV_SEED: values.seed };
  await check(`${addonRequests} requests under faults over the addon, six times`, env, vitest, [
    "run",
    "tools/faults",
  ]);
}

async function properties() {
  const env = { KV_PROPERTY_FACTOR: `${propertyFactor}` };
  const args = ["run", "--config", "tools/long/vitest.config.ts"];
  await check(`properties with ${propertyFactor} times their runs`, env, vitest, args);
}

/**
 * Random users and attackers at one P and one D, without and with a key, for each connector: 50
 * scenes, times the factor.
 */
async function isolationProperty() {
  const env = { KV_PROPERTY_FACTOR: `${propertyFactor}` };
  for (const connector of connectors) {
    const file = `packages/${connector}/test/isolation-property.test.ts`;
    const args = ["run", "--config", "tools/long/vitest.config.ts", file];
    await check(
      `${connector}: ${100 * propertyFactor} scenes of users and attackers`,
      env,
      vitest,
      args,
    );
  }
}

/**
 * Damaged metadata against the stand-in for NIXL; some of it against NIXL itself, in a process that
 * may crash. And damaged notifications.
 */
async function damagedBytes() {
  const checked = Math.ceil(mutations / 100);
  const env = { KV_MUTATIONS: `${mutations}`, KV_CHECKED_MUTATIONS: `${checked}` };
  const files = [
    "packages/nixl/test/metadata/metadata-mutations.test.ts",
    "packages/nixl/test/metadata/metadata-check.long.test.ts",
    "packages/protocol/src/notifications/damaged-notifications.test.ts",
  ];
  const what = `${mutations} mutated blobs, ${checked} of them loaded by NIXL, and as many notifications`;
  await check(what, env, vitest, ["run", ...files]);
}

/**
 * Requests whose bodies, and answers whose streams, are cut at every byte, through each way of the
 * router.
 */
async function streamCuts() {
  const env = { KV_STREAM_CUTS: "all", KV_SEED: values.seed };
  await check("answers and bodies cut at every byte", env, vitest, [
    "run",
    "packages/proxy/test/cuts",
  ]);
}

/**
 * P or D ends by SIGKILL at random moments and starts again at its address: 1,000 times in memory,
 * and 100 times between processes over NIXL, pull and push each.
 */
async function restarts() {
  const env = { KV_RESTARTS: "1000", KV_NIXL_RESTARTS: "100", KV_SEED: values.seed };
  const files = [
    ...connectors.map((name) => `packages/${name}/test/restarts.test.ts`),
    "tools/faults/restarts.long.test.ts",
  ];
  for (const file of files)
    await check(`restarts at one address, ${file}`, env, vitest, ["run", file]);
}

/** Whether costs grow no faster than wanted, at small sizes. */
async function growth() {
  const args = ["tools/bench/bench.mjs", "growth", "--short"];
  await check("how costs grow, small sizes", {}, process.execPath, args);
}

/** Processes that end at random places, each of which counts as a run. */
function exitsOfProcesses() {
  return countedRuns("exits", ["--count", `${exits}`, "--seed", values.seed, "--jobs", `${jobs}`]);
}

/**
 * Every end of a peer in every phase over every route, ten times each. `--cells` has the beginnings
 * of their names, to go on where a run was cut off.
 */
function deathsOfPeers() {
  return countedRuns("deaths", values.cells === "" ? [] : ["--cells", values.cells]);
}

/**
 * Every number of free file descriptors from 0 to 32, each with a new agent, two of them, and a
 * peer that is added and read: no process ends by a signal.
 */
async function fewDescriptors() {
  const file = "packages/nixl/test/process/few-descriptors.long.test.ts";
  await check("0 to 32 descriptors left", { KV_LONG: "1" }, vitest, ["run", file]);
}

/** The recipes for bundlers: each is built with the packed packages, and its output runs alone. */
async function bundlers() {
  await check("bundles of @kv/nixl, alone in a folder", {}, vitest, [
    "run",
    "tools/pack/bundlers.long.test.ts",
  ]);
}

/** Runs a program of tools/long over NIXL, and adds what its last line has counted. */
async function countedRuns(kind, args) {
  if (!nixl.ready) {
    console.log(
      `${process.env.CI === "true" ? "FAIL" : "SKIPPED"}  ${kind} need NIXL: ${nixl.why}`,
    );
    if (process.env.CI === "true") failed += 1;
    return;
  }
  let last = "";
  const code = await new Promise((resolve) => {
    const child = spawn(process.execPath, ["--import", "tsx", `tools/long/${kind}.ts`, ...args], {
      cwd: root,
      stdio: ["ignore", "pipe", "inherit"],
    });
    child.stdout.on("data", (chunk) => {
      process.stdout.write(chunk);
      last = (last + chunk).slice(-200);
    });
    child.on("close", resolve);
  });
  const counts = /: (\d+) passed, (\d+) failed\n$/.exec(last);
  if (counts !== null) {
    passed += Number(counts[1]);
    failed += Number(counts[2]);
  }
  if (counts === null || (code !== 0 && counts[2] === "0")) {
    failed += 1;
    console.log(`FAIL  tools/long/${kind}.ts ended with ${code}`);
  }
}

/**
 * The files of tools/attacks one after another, the floods last: they are measured against a demo
 * that nothing else disturbs.
 */
async function attacks() {
  const folder = join(root, "tools/attacks");
  const words = values.attacks.split(",").filter((word) => word !== "");
  const files = readdirSync(folder)
    .filter((file) => file.endsWith(".ts") && !file.endsWith(".test.ts"))
    .filter((file) => words.length === 0 || words.some((word) => file.includes(word)))
    .sort(
      (a, b) => Number(a === "under-flood.ts") - Number(b === "under-flood.ts") || (a < b ? -1 : 1),
    );
  if (files.length === 0) {
    failed += 1;
    console.log(`FAIL  no file of tools/attacks has one of ${words.join(", ")} in its name`);
  }
  const rows = [];
  for (const file of files) {
    const row = await runAttack(join(folder, file), file === "under-flood.ts");
    if (row.ok) passed += 1;
    else failed += 1;
    rows.push(row);
    console.log(`${row.ok ? "ok   " : "FAIL "} ${file}`);
  }
  console.log("\n| attack | tries | result |\n| --- | --- | --- |");
  for (const { attack, tries, result, ok } of rows)
    console.log(`| ${attack} | ${tries} | ${ok ? "" : "**FAIL** "}${result} |`);
  console.log("");
}

/** The row of one attack. Its process is ended with all that it started. */
function runAttack(file, runsFloods) {
  const args = ["--import", "tsx", "tools/attacks/support/run-attack.ts", file];
  return new Promise((resolve) => {
    const child = spawn(process.execPath, args, {
      cwd: root,
      detached: true,
      stdio: ["ignore", "pipe", "inherit"],
    });
    let text = "";
    let late = "";
    const timeoutMs = runsFloods ? FLOODS_TIMEOUT_MS : ATTACK_TIMEOUT_MS;
    const timer = setTimeout(() => {
      late = ` after ${timeoutMs / 1000} s`;
      child.kill("SIGKILL");
    }, timeoutMs);
    child.stdout.on("data", (chunk) => {
      text = (text + chunk).slice(-100_000);
    });
    child.on("close", (code, signal) => {
      clearTimeout(timer);
      endGroup(child.pid);
      try {
        const row = JSON.parse(text.trimEnd().split("\n").at(-1));
        resolve({ ...row, ok: row.ok === true && code === 0 });
      } catch {
        resolve({
          attack: file,
          tries: "-",
          result: `ended with ${signal ?? code}${late}`,
          ok: false,
        });
      }
    });
  });
}

/** Ends the servers that a killed attack has left. */
function endGroup(pid) {
  try {
    process.kill(-pid, "SIGKILL");
  } catch {
    // All of them have ended.
  }
}

const { nixl } = await setup();
console.log(`seed ${values.seed}`);
const parts = only.flatMap((kind) => PARTS[kind] ?? []);
for (const [kind, runAll] of Object.entries(KINDS))
  if (only.includes(kind) && !parts.includes(kind)) await runAll();
console.log(`${passed} passed, ${failed} failed`);
process.exitCode = failed === 0 && passed > 0 ? 0 : 1;
