import { answerToken, FILLERS, factToken, questionToken, SUBJECTS, VALUES } from "./recall-model.js";

/** A prompt that states facts and ends with a question about one of them. */
export interface Question {
  readonly promptTokens: readonly number[];
  /** The correct first token of the answer. */
  readonly answer: number;
}

/** Facts of a prompt, each about another subject. */
const FACTS = 24;
/** One question of so many has a prompt that states a wrong value, so that the score is not 1. */
const WRONG_EVERY = 8;

/** A fixed set of questions, the same in every run. */
export function questionSet(count: number): Question[] {
  const random = linearCongruential(20_26);
  return Array.from({ length: count }, (_, index): Question => {
    const length = 49 + random(128);
    const promptTokens = Array.from({ length }, () => FILLERS.first + random(FILLERS.count));
    const first = random(SUBJECTS);
    const positions = distinct(FACTS, length - 1, random);
    const facts = positions.map((position, i) => ({
      position,
      subject: (first + i) % SUBJECTS,
      value: random(VALUES),
    }));
    for (const { position, subject, value } of facts) promptTokens[position] = factToken(subject, value);
    const { subject, value } = facts[random(FACTS)] as (typeof facts)[number];
    promptTokens[length - 1] = questionToken(subject);
    const isWrong = index % WRONG_EVERY === WRONG_EVERY - 1;
    return { promptTokens, answer: answerToken(isWrong ? (value + 1) % VALUES : value) };
  });
}

/** Whole numbers below a limit (Numerical Recipes' generator; the high bits). */
function linearCongruential(seed: number): (limit: number) => number {
  let state = seed;
  return (limit) => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    return Math.floor((state / 2 ** 32) * limit);
  };
}

function distinct(count: number, limit: number, random: (limit: number) => number): number[] {
  const found = new Set<number>();
  while (found.size < count) found.add(random(limit));
  return [...found];
}
