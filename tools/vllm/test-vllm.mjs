// npm run test:vllm: installs vLLM for the CPU once, then runs the live tests against its servers.
// Not part of npm test.
//     --only pull-0.33,push-0.33,pull-0.32,push-0.32,kinds,cache-formats,proxy,readback,verify,tier,tier-engines,pull-0.31,push-0.31,fleet,data-parallel,envoy
// --record: each part that passes is entered in docs/tested/vllm.json, from which
// docs/vllm-versions.md has its table. All other arguments go to vitest: -t "P with TP 1" runs one
// suite and starts only the servers that it needs.
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { root, run, runInTerminal, setupWithNixl, vitest } from "../setup/setup.mjs";

const PARTS = [
  "pull-0.33",
  "push-0.33",
  "pull-0.32",
  "push-0.32",
  "kinds",
  "cache-formats",
  "proxy",
  "readback",
  "verify",
  "tier",
];
const NAMED = ["tier-engines", "envoy", "pull-0.31", "push-0.31", "fleet", "data-parallel"];
const args = process.argv.slice(2);
const at = args.indexOf("--only");
const [, list = ""] = at < 0 ? ["", PARTS.join(",")] : args.splice(at, 2);
const only = list.split(",");
for (const part of only) {
  if ([...PARTS, ...NAMED].includes(part)) continue;
  console.error(
    `--only must be of ${[...PARTS, ...NAMED].join(", ")}, not ${JSON.stringify(part)}`,
  );
  process.exit(2);
}

const isRecorded = args.includes("--record");
if (isRecorded && args.length > 1) {
  console.error("--record takes whole parts: leave out the arguments of vitest");
  process.exit(2);
}

async function recordParts(report) {
  const records = join(root, "docs/tested/vllm.json");
  const parts = JSON.parse(readFileSync(records, "utf8"));
  for (const { name, status, assertionResults } of report.testResults) {
    if (status !== "passed") continue;
    const passed = assertionResults.filter((test) => test.status === "passed").length;
    const date = new Date().toISOString().slice(0, 10);
    parts[basename(name, ".live.ts")] = { date, passed, leftOut: assertionResults.length - passed };
  }
  writeFileSync(records, `${JSON.stringify(parts, null, 2)}\n`);
  await run("node", ["--import", "tsx", join(root, "tools/tested/record.ts")]);
}

await setupWithNixl("live tests need NIXL");
await run("bash", [join(root, "tools/vllm/setup.sh")], { show: true });
const folder = mkdtempSync(join(tmpdir(), "kv-vllm-"));
const reportFile = join(folder, "report.json");
const vitestArgs = [
  "run",
  "--config",
  "tools/vllm/vitest.config.ts",
  ...only.map((part) => `tools/vllm/${part}.live.ts`),
  ...(isRecorded
    ? ["--reporter=default", "--reporter=json", `--outputFile.json=${reportFile}`]
    : args),
];
process.exitCode = await runInTerminal(vitest, vitestArgs);
if (isRecorded) await recordParts(JSON.parse(readFileSync(reportFile, "utf8")));
rmSync(folder, { recursive: true });
