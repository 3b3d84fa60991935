import { expect, test } from "vitest";
import { parseGenerationRequest } from "../request/generation-request.js";
import { PrefillCosts, uncomputedTokens } from "./prefill-costs.js";

const request = parseGenerationRequest("/v1/completions", Buffer.from('{"prompt":[1,2]}'));
const leg = (tokens: number, durationMs: number, more = {}) => ({
  ...{ request, usage: { prompt_tokens: tokens }, durationMs, wasAlone: true, ...more },
});

test("10 legs that read 1,000 tokens in 100 ms tell what reading costs, and change nothing of what computing costs", () => {
  const costs = new PrefillCosts();
  for (const tokens of [500, 1000, 1500]) costs.ended(leg(tokens, tokens));
  expect(costs.msPerToken).toBeCloseTo(1);
  for (let count = 0; count < 10; count += 1)
    costs.ended(leg(1060, 60 + 100, { cachedTokens: 1000, readTokens: 1000 }));
  expect(costs.msPerToken).toBeCloseTo(1);
  expect(costs.legMs(60)).toBeCloseTo(60);
  expect(costs.readingMs(1060, 1000)).toBeCloseTo(160);
  // One that waited behind others tells neither.
  costs.ended(leg(1060, 10_000, { cachedTokens: 1000, readTokens: 1000, wasAlone: false }));
  expect(costs.readingMs(1060, 1000)).toBeCloseTo(160);
});

test.each([
  ["what the answer says, in its KV parameters", { cachedTokens: 5, readTokens: 9 }, 5],
  ["what its usage says", { usage: { prompt_tokens_details: { cached_tokens: 7 } }, readTokens: 9 }, 7],
  ["what it was given to read, where it says nothing", { readTokens: 9 }, 9],
  ["nothing, where nothing is known", {}, undefined],
])("the tokens that a leg did not compute are %s", (_, more, expected) => {
  expect(uncomputedTokens(leg(10, 1, more))).toBe(expected);
});
