import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { expect, onTestFinished, test } from "vitest";
import { ARCHITECTURES } from "../../packages/kv-plan/src/model/architectures.js";
import { readCases } from "./changed-config.js";
import { failuresOf, wasAsked } from "./models.js";

const root = fileURLToPath(new URL("../..", import.meta.url));
const fixture = (name: string) => fileURLToPath(new URL(`fixtures/${name}`, import.meta.url));
const learned = readCases(fixture("architectures.jsonl.gz"));
const { cases } = readCases(fixture("architectures.jsonl.gz"), fixture("changed-configs.jsonl.gz"));

test("issue 69: the caches of every changed configuration are vLLM's own, or are refused", () => {
  expect(failuresOf(cases)).toEqual([]);
}, 600_000);

test("issue 69: the gate has so many architectures with one and two fields changed", () => {
  const gate = cases.slice(learned.cases.length);
  const whole = Object.keys(ARCHITECTURES.architectures).filter((name) => {
    const own = gate.filter(({ line }) => line.config === name && wasAsked(line));
    const flags = new Set(own.map(({ line }) => `${line.tp} ${line.kv_cache_dtype}`));
    return own.length >= 30 && flags.size === 6;
  });
  expect(whole.length).toBeGreaterThanOrEqual(GATED);
});

/** Of the architectures that are planned; `cache_cases.py --gate` goes on with the others. */
const GATED = 107;

test("issue 69: the committed table is what the learner makes of the answers", () => {
  const folder = mkdtempSync(join(tmpdir(), "kv-table-"));
  onTestFinished(() => rmSync(folder, { recursive: true }));
  const out = join(folder, "architectures.json");
  const files = ["architectures", "changed-configs", "drafts", "models", "models-more"];
  execFileSync(process.execPath, [
    ...["--import", "tsx", join(root, "tools/vllm/learn-architectures.ts"), "--out", out],
    ...files.map((name) => fixture(`${name}.jsonl.gz`)),
  ]);
  const table = readFileSync(join(root, "packages/kv-plan/src/model/architectures.json"), "utf8");
  expect(readFileSync(out, "utf8")).toBe(table);
}, 1_200_000);
