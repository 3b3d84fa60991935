import { fileURLToPath } from "node:url";
import { expect, test } from "vitest";
import { ARCHITECTURES } from "../../packages/kv-plan/src/model/architectures.js";
import { readCases } from "./changed-config.js";
import { failuresOf } from "./models.js";

const fixture = (name: string) => fileURLToPath(new URL(`fixtures/${name}`, import.meta.url));
const learned = readCases(fixture("architectures.jsonl.gz"));
const { cases } = readCases(fixture("architectures.jsonl.gz"), fixture("changed-configs.jsonl.gz"));

test("issue 69: the caches of every changed configuration are vLLM's own, or are refused", () => {
  expect(failuresOf(cases)).toEqual([]);
}, 600_000);

test("issue 69: the gate has so many architectures with one and two fields changed", () => {
  const gate = cases.slice(learned.cases.length);
  const whole = Object.keys(ARCHITECTURES.architectures).filter((name) => {
    const own = gate.filter(({ line }) => line.config === name);
    const flags = new Set(own.map(({ line }) => `${line.tp} ${line.kv_cache_dtype}`));
    return own.length >= 30 && flags.size === 6;
  });
  expect(whole.length).toBeGreaterThanOrEqual(GATED);
});

/** Of the architectures that are planned; `cache_cases.py --gate` goes on with the others. */
const GATED = 60;
