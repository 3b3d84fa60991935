import fc from "fast-check";
import { expect, test } from "vitest";
import { topLogprobs } from "./top-logprobs.js";

test("equals the sorted softmax", () => {
  const logit = fc.integer({ min: -8, max: 8 });
  fc.assert(
    fc.property(fc.array(logit, { minLength: 1, maxLength: 40 }), fc.nat(50), (row, more) => {
      const count = Math.min(row.length, 1 + more);
      const sum = row.reduce((total, value) => total + Math.exp(value), 0);
      const order = row
        .map((value, token) => ({ value, token }))
        .sort((a, b) => b.value - a.value || a.token - b.token);
      const top = topLogprobs(Float32Array.from(row), count);
      expect([...(top?.tokens ?? [])]).toEqual(order.slice(0, count).map(({ token }) => token));
      top?.logprobs.forEach((logprob, i) => {
        expect(logprob).toBeCloseTo((order[i]?.value ?? 0) - Math.log(sum), 5);
      });
    }),
  );
});

test("large logits do not overflow, masked ones are never chosen first", () => {
  const top = topLogprobs(Float32Array.of(Number.NEGATIVE_INFINITY, 1e30, 1e4), 2);
  expect([...(top?.tokens ?? [])]).toEqual([1, 2]);
  expect(top?.logprobs[0]).toBe(0);
});

test.each([[[1, Number.NaN]], [[Number.POSITIVE_INFINITY, 0]], [[Number.NEGATIVE_INFINITY]]])(
  "returns undefined for the logits %j",
  (row) => {
    expect(topLogprobs(Float32Array.from(row), 1)).toBeUndefined();
  },
);
