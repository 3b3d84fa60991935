import { type CheckedPair, refusalOf, VLLM_REFUSALS } from "@kv/plan/vllm";
import { describe, expect, test } from "vitest";
import { pairOf, refusalCases } from "./refusal-cases.js";

/** With the answers of vLLM's own code, which `refusals.ts` recorded. */
const cases = refusalCases().map(({ changed, says }) => ({ says, pair: pairOf(changed) }));
const brief = ({ local, remote, ...facts }: CheckedPair) =>
  JSON.stringify({ local, remote, ...facts });

describe.each(Object.keys(cases[0]?.says ?? {}))("field.md P2: vLLM %s", (version) => {
  test("the recording has an answer to each pair", () => {
    expect(cases.filter(({ says }) => says[version] === undefined)).toEqual([]);
  });

  test("the table refuses what vLLM refuses, for vLLM's reason", () => {
    const wrong = cases.flatMap(({ pair, says: { [version]: says } }) => {
      const ours = refusalOf(pair, version);
      const agrees =
        says === null ? ours === undefined : ours !== undefined && says?.includes(ours.says);
      return agrees ? [] : [`${brief(pair)}: vLLM ${JSON.stringify(says)}, the table ${ours?.id}`];
    });
    expect(wrong).toEqual([]);
  });
});

test.each(VLLM_REFUSALS)("field.md P2: there is a pair that only $id refuses", ({ id }) => {
  const alone = cases.filter(({ pair }) => {
    const refusing = VLLM_REFUSALS.filter(({ refuses }) => refuses(pair));
    return refusing.length === 1 && refusing[0]?.id === id;
  });
  expect(alone.length).toBeGreaterThan(0);
});
