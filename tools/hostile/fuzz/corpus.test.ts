import { readdirSync } from "node:fs";
import { seededRandom } from "@kv/transport-memory";
import { describe, expect, test } from "vitest";
import { CORPUS, checkInput, readInputs } from "./fuzz.js";
import { mutate } from "./mutate.js";
import type { FuzzTarget } from "./target.js";
import { TARGETS } from "./targets/index.js";

const MUTANTS = 300;

const mutantsOf = (target: FuzzTarget, seed: number) => {
  const { integer } = seededRandom(seed);
  return Array.from({ length: MUTANTS }, () => mutate(target, target.seeds, integer));
};

describe.each(Object.entries(TARGETS))("%s", (name, target) => {
  test(`each seed is accepted; the corpus and ${MUTANTS} mutants are read, or refused with a KvError`, () => {
    const corpus = readInputs(`${CORPUS}${name}`);
    for (const input of [...target.seeds, ...corpus, ...mutantsOf(target, 2)])
      expect(checkInput(target, input), Buffer.from(input).toString("hex")).toBeUndefined();
  });
});

test("each folder of the corpus belongs to a target", () => {
  expect(readdirSync(CORPUS).filter((name) => TARGETS[name] === undefined)).toEqual([]);
});

test("an error that is no KvError is reported", () => {
  const read = (input: Uint8Array) => {
    if (input.length > 2) throw new RangeError("too deep");
  };
  const failing = { seeds: [], read };
  expect(checkInput(failing, new Uint8Array(2))).toBeUndefined();
  expect(checkInput(failing, new Uint8Array(3))).toContain("too deep");
});

test("the same seed makes the same inputs", () => {
  const [target] = Object.values(TARGETS);
  if (target === undefined) throw new Error("there are no targets");
  expect(mutantsOf(target, 7)).toEqual(mutantsOf(target, 7));
});
