import { expect, test } from "vitest";
import { parseGenerationRequest } from "../request/generation-request.js";
import type { InstancePool } from "./instance-pool.js";
import { PrefillCosts, uncomputedTokens } from "./prefill-costs.js";

const request = parseGenerationRequest("/v1/completions", Buffer.from('{"prompt":[1,2]}'));
const leg = (tokens: number, durationMs: number, more = {}) => ({
  request,
  usage: { prompt_tokens: tokens },
  durationMs,
  wasAlone: true,
  ...more,
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
  [
    "what its usage says",
    { usage: { prompt_tokens_details: { cached_tokens: 7 } }, readTokens: 9 },
    7,
  ],
  ["what it was given to read, where it says nothing", { readTokens: 9 }, 9],
  ["nothing, where nothing is known", {}, undefined],
])("the tokens that a leg did not compute are %s", (_, more, expected) => {
  expect(uncomputedTokens(leg(10, 1, more))).toBe(expected);
});

const text = (length: number) =>
  parseGenerationRequest(
    "/v1/completions",
    Buffer.from(JSON.stringify({ prompt: "x".repeat(length) })),
  );

test("the tokens of a prompt are those of its ids, or its text's by what the texts before had, and unknown for embeddings", () => {
  const costs = new PrefillCosts();
  expect(costs.promptTokens(request)).toBe(2);
  const { length } = JSON.stringify({ prompt: "x".repeat(1000) });
  expect(costs.promptTokens(text(1000))).toBe(Math.ceil(length / 4));
  // Of token ids no text is known; of a text ten legs with 2 characters in a token are 0.9^10 away
  // from it.
  costs.ended(leg(1, 1));
  expect(costs.charactersPerToken).toBe(4);
  for (let count = 0; count < 10; count += 1)
    costs.ended({ ...leg(length / 2, 1), request: text(1000) });
  expect(costs.charactersPerToken).toBeCloseTo(2 + 2 * 0.9 ** 10);
  const embeddings = parseGenerationRequest(
    "/v1/completions",
    Buffer.from('{"prompt_embeds":"AAAA"}'),
  );
  expect(costs.promptTokens(embeddings)).toBeUndefined();
});

test("a prompt waits for as many legs as the least loaded instance has", () => {
  const costs = new PrefillCosts();
  const pool = { fewestInFlight: () => 3 as number | undefined };
  expect(costs.waitMs(pool as InstancePool)).toBeUndefined();
  costs.ended(leg(100, 50));
  // One that was not alone says nothing of a leg's time.
  costs.ended(leg(100, 5000, { wasAlone: false }));
  expect(costs.waitMs(pool as InstancePool)).toBe(150);
  expect(costs.waitMs({ fewestInFlight: () => undefined } as InstancePool)).toBeUndefined();
});

test("a line through legs of 20 ms and 0.1 ms for each token is found, and begins at 0 while the legs are alike", () => {
  const costs = new PrefillCosts();
  expect([costs.msPerToken, costs.legMs(1)]).toEqual([undefined, undefined]);
  costs.ended(leg(1000, 120));
  costs.ended(leg(1001, 120.1));
  expect(costs.msPerToken).toBeCloseTo(0.12);
  for (let count = 0; count < 200; count += 1)
    for (const tokens of [100, 1000, 4000]) costs.ended(leg(tokens, 20 + 0.1 * tokens));
  expect(costs.msPerToken).toBeCloseTo(0.1);
  expect(costs.legMs(2000)).toBeCloseTo(220);
  // What is read is not computed: nothing is known of reading yet.
  expect(costs.readingMs(2000, 1500)).toBeCloseTo(50);
  expect(costs.readingMs(2000, 2500)).toBe(0);
});

test("a source that was slow once is tried again after some legs", () => {
  const costs = new PrefillCosts();
  const compute = () => costs.ended(leg(100, 100));
  const fetch = (durationMs: number) =>
    costs.ended(leg(100, durationMs, { cachedTokens: 50, fetchTokens: 50 }));
  const isTried = () => (costs.fetchMs(1) ?? 0) < (costs.msPerToken ?? 0);
  compute();
  // Its handshake took half a second.
  fetch(550);
  expect(isTried()).toBe(false);
  let legs = 0;
  for (; !isTried() && legs < 1000; legs += 1) compute();
  expect(legs).toBeGreaterThan(20);
  expect(legs).toBeLessThan(60);
  fetch(55);
  compute();
  expect(costs.fetchMs(50)).toBeLessThan(30);
});
