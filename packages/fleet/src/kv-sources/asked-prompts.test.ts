import { expect, test } from "vitest";
import { AskedPrompts } from "./asked-prompts.js";

const prompt = (begin: number, length: number) =>
  Array.from({ length }, (_, at) => (at < 8 ? at : begin + at));
const shown = (asked: AskedPrompts) =>
  asked.mostAsked().map(({ model, tokens, uses }) => [model, tokens[8], tokens.length, uses]);

test("a further turn takes the place of the one before, and the most used come first", () => {
  const asked = new AskedPrompts();
  for (const length of [20, 30, 40]) asked.add("m", prompt(100, length));
  asked.add("m", prompt(200, 20));
  asked.add("m", prompt(300, 20));
  // Another model's KV is another one.
  asked.add("other", prompt(100, 50));
  expect(shown(asked)).toEqual([
    ["m", 108, 40, 3],
    ["other", 108, 50, 1],
    ["m", 308, 20, 1],
    ["m", 208, 20, 1],
  ]);
});

test.each([
  ["prompts", 1000, 100, 128],
  ["tokens", 20, 2 ** 18, 4],
])("the least used are forgotten above a number of %s", (_, count, length, kept) => {
  const asked = new AskedPrompts();
  asked.add("m", prompt(7, length));
  asked.add("m", prompt(7, length));
  for (let at = 1; at < count; at += 1) asked.add("m", prompt(at * 2 ** 19, length));
  expect(asked.mostAsked()).toHaveLength(kept);
  expect(shown(asked)[0]).toEqual(["m", 15, length, 2]);
});
