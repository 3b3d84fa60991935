// A long suite: scores an engine and a pair.
import { isLongRun } from "@kv/testing/long-run";
import { expect, it } from "vitest";
import { questionSet } from "../src/accuracy/recall-model.js";
import { ended, startDemo } from "./support/run-demo.js";

const QUESTIONS = isLongRun ? 24 : 8;

it("has the same score and the same answers through every pair as one engine, and a lower one with damaged KV", async () => {
  const args = ["accuracy", "--transport", "memory", "--questions", `${QUESTIONS}`, "--json"];
  const { code, stdout, stderr } = await ended(startDemo(args));
  const report = JSON.parse(stdout) as {
    pairs: { name: string; score: number }[];
    damaged_control: { score: number };
  };
  // Every eighth prompt states a wrong value.
  expect(report).toMatchObject({ ok: true, questions: QUESTIONS, reference_score: 0.875 });
  expect(report.pairs).toEqual(
    [
      "pull",
      "push",
      "push, layer by layer",
      "Neuron staging on both sides",
      "TP 1 to 2",
      "TP 2 to 1",
      "blocks 16 to 32",
      "blocks 32 to 16",
    ].map((name) => ({ name, score: 0.875, different_answers: 0 })),
  );
  expect(report.damaged_control.score).toBeLessThan(0.875);
  expect(stderr).toContain("damaged control: score 0.");
  expect(code).toBe(0);
}, 180_000);

it("asks a fixed set of different questions", () => {
  const questions = questionSet(64);
  expect(questionSet(64)).toEqual(questions);
  expect(questionSet(8)).toEqual(questions.slice(0, 8));
  expect(new Set(questions.map(({ promptTokens }) => promptTokens.join())).size).toBe(64);
  // The facts are spread over all blocks of the prompts.
  expect(Math.max(...questions.map(({ promptTokens }) => promptTokens.length))).toBeGreaterThan(
    150,
  );
});
