import { describe, expect, test } from "vitest";
import { checkInput } from "./check-input.js";
import { corpusTargets, readCorpus } from "./corpus.js";
import { mutate, seededPick } from "./mutate.js";
import type { FuzzTarget } from "./target.js";
import { TARGETS } from "./targets/index.js";

const MUTANTS = 300;

describe.each(Object.entries(TARGETS))("%s", (name, target) => {
  test("the inputs of the corpus are read, or refused with a KvError", () => {
    const failures = readCorpus(name).map(({ file, input }) => [file, checkInput(target, input)]);
    expect(failures.filter(([, failure]) => failure !== undefined)).toEqual([]);
  });

  test(`each seed is accepted, and ${MUTANTS} mutants are read or refused`, () => {
    expect(target.seeds.map((seed) => checkInput(target, seed))).toEqual(
      target.seeds.map(() => undefined),
    );
    const pick = seededPick(1);
    for (let i = 0; i < MUTANTS; i += 1) {
      const input = mutate(target, target.seeds, pick);
      expect(checkInput(target, input), Buffer.from(input).toString("hex")).toBeUndefined();
    }
  });
});

test("each folder of the corpus belongs to a target", () => {
  expect(corpusTargets().filter((name) => TARGETS[name] === undefined)).toEqual([]);
});

describe("the check", () => {
  const target = (read: FuzzTarget["read"]): FuzzTarget => ({ seeds: [], words: [], read });

  test("reports an error that is no KvError", () => {
    const failing = target((input) => {
      if (input.length > 2) throw new RangeError("too deep");
    });
    expect(checkInput(failing, new Uint8Array(2))).toBeUndefined();
    expect(checkInput(failing, new Uint8Array(3))).toContain("too deep");
  });

  test("the same seed makes the same inputs", () => {
    const [seeded] = Object.values(TARGETS);
    if (seeded === undefined) throw new Error("there are no targets");
    const inputs = () => {
      const pick = seededPick(7);
      return Array.from({ length: 50 }, () =>
        Buffer.from(mutate(seeded, seeded.seeds, pick)).toString("hex"),
      );
    };
    expect(inputs()).toEqual(inputs());
  });
});
