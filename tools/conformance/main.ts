import { existsSync } from "node:fs";
import { parseArgs } from "node:util";
import { familyOf } from "./families.js";
import { judgeModel } from "./models.js";
import { judge, type Outcome } from "./outcome.js";
import { readVectors, type Selection } from "./vector-file.js";
import { replayWire } from "./wire.js";

const SHOWN_FAILURES = 20;
const USAGE = `usage: npm run conformance -- [--only KEY=VALUE]… FILE.jsonl…
       npm run conformance -- [--refused] MODELS.jsonl…
       npm run conformance -- --wire DIR

Runs our functions on recorded inputs of vLLM's functions, or on recorded traffic of vLLM servers,
and compares the results. --refused prints why a model's case is refused.`;

const counts = { passed: 0, failed: 0, beyond: 0 };
/** Of the models' cases that passed, those that we refuse. */
let refused = 0;
let models = 0;
let failedModels = 0;
let showsRefused = false;
const rules = new Map<string, number>();

function count(where: string, outcome: Outcome): void {
  counts[outcome.kind] += 1;
  if (outcome.kind === "passed" && outcome.refused !== undefined) {
    refused += 1;
    if (showsRefused) console.log(`refused  ${where}: ${outcome.refused}`);
  }
  if (outcome.kind === "beyond") countRule(`beyond, by rule ${outcome.rule}`);
  if (outcome.kind === "passed" && outcome.stricter !== undefined)
    countRule(`passed as refused here, by rule ${outcome.stricter}`);
  if (outcome.kind === "failed" && counts.failed <= SHOWN_FAILURES)
    console.log(`FAIL  ${where}: ${outcome.reason}`);
  if (outcome.kind === "failed" && counts.failed === SHOWN_FAILURES + 1)
    console.log("FAIL  … more are only counted");
}

function countRule(rule: string): void {
  rules.set(rule, (rules.get(rule) ?? 0) + 1);
}

function replayFile(path: string, only: readonly Selection[]): void {
  if (!existsSync(path)) {
    count(path, { kind: "failed", reason: "no such file" });
    return;
  }
  const before = { ...counts };
  for (const { line, vector, model, config } of readVectors(path, only)) {
    const where = `${path}:${line}`;
    if (model !== undefined) {
      models += 1;
      const outcome = judgeModel(model, path, config);
      if (outcome.kind === "failed") failedModels += 1;
      count(`${where}: ${model.config} at TP ${model.tp}, ${model.kv_cache_dtype}`, outcome);
      continue;
    }
    if (vector === undefined) {
      count(where, { kind: "failed", reason: "the line is not a vector" });
      continue;
    }
    const family = familyOf(vector.in);
    if (family === undefined)
      count(where, { kind: "failed", reason: "no known family of vectors" });
    else count(where, judge(family.name, family.replay, vector));
  }
  const [passed, failed, beyond] = (["passed", "failed", "beyond"] as const).map(
    (kind) => counts[kind] - before[kind],
  );
  console.log(
    `${path}: ${passed} passed, ${failed} failed${beyond === 0 ? "" : `, ${beyond} beyond`}`,
  );
}

function selections(given: readonly string[]): Selection[] {
  return given.map((text) => {
    const at = text.indexOf("=");
    if (at <= 0) throw new Error(`--only wants KEY=VALUE, got "${text}"`);
    return { key: text.slice(0, at), value: text.slice(at + 1) };
  });
}

function main(): void {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      only: { type: "string", multiple: true, default: [] },
      wire: { type: "string", multiple: true, default: [] },
      refused: { type: "boolean", default: false },
      help: { type: "boolean", short: "h", default: false },
    },
  });
  if (values.help || (positionals.length === 0 && values.wire.length === 0)) {
    console.log(USAGE);
    process.exitCode = values.help ? 0 : 2;
    return;
  }
  const only = selections(values.only);
  showsRefused = values.refused;
  for (const path of positionals) replayFile(path, only);
  for (const folder of values.wire) replayWire(folder, count);
  for (const [rule, number] of rules) console.log(`${rule}: ${number}`);
  if (counts.beyond > 0) console.log(`${counts.beyond} beyond`);
  if (models > 0)
    console.log(
      `${models} cases of models: ${models - refused - failedModels} equal, ${refused} refused`,
    );
  console.log(`${counts.passed} passed, ${counts.failed} failed`);
  if (counts.failed > 0 || counts.passed + counts.beyond === 0) process.exitCode = 1;
}

try {
  main();
} catch (error) {
  console.error(error instanceof Error ? error.message : error);
  process.exitCode = 2;
}
