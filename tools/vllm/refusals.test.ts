import { readFileSync } from "node:fs";
import { type CheckedPair, refusalOf, VLLM_REFUSALS } from "@kv/plan/vllm";
import { describe, expect, test } from "vitest";
import { refusalCases } from "./refusal-cases.js";

/**
 * Per version, vLLM's answer to each of `refusalCases()`. `refusals.ts` made it with vLLM's own
 * code.
 */
const recorded = JSON.parse(
  readFileSync(new URL("fixtures/refusals.json", import.meta.url), "utf8"),
) as Readonly<Record<string, readonly (string | null)[]>>;
const cases = refusalCases();
const brief = ({ local, remote, ...facts }: CheckedPair) =>
  JSON.stringify({ local, remote, ...facts });

describe.each(Object.keys(recorded))("field.md P2: vLLM %s", (version) => {
  const answers = recorded[version] ?? [];
  test("the recording has an answer to each pair", () => {
    expect(answers).toHaveLength(cases.length);
  });

  test("the table refuses what vLLM refuses, for vLLM's reason", () => {
    const wrong = cases.flatMap((pair, at) => {
      const says = answers[at];
      const ours = refusalOf(pair, version);
      const agrees =
        says === null ? ours === undefined : ours !== undefined && says?.includes(ours.says);
      return agrees ? [] : [`${brief(pair)}: vLLM ${JSON.stringify(says)}, the table ${ours?.id}`];
    });
    expect(wrong).toEqual([]);
  });
});

test.each(VLLM_REFUSALS)("field.md P2: there is a pair that only $id refuses", ({ id }) => {
  const alone = cases.filter((pair) => {
    const refusing = VLLM_REFUSALS.filter(({ refuses }) => refuses(pair));
    return refusing.length === 1 && refusing[0]?.id === id;
  });
  expect(alone.length).toBeGreaterThan(0);
});
