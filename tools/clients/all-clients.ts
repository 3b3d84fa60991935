import { aiCases } from "./ai-client.js";
import { anthropicCases } from "./anthropic-client.js";
import { curlCases } from "./curl-client.js";
import { openaiCases } from "./openai-client.js";
import type { LinePeer } from "./python.js";
import { ASKED, type Cases, LONG_ANSWER, type Outcome, outcomesOf } from "./requests.js";

const CLIENTS: Readonly<Record<string, (url: string) => Cases>> = {
  "openai of npm": openaiCases,
  "@anthropic-ai/sdk": anthropicCases,
  ai: aiCases,
  curl: curlCases,
};

/** Of each client the outcome of each case. */
export type Outcomes = Readonly<Record<string, Readonly<Record<string, Outcome>>>>;

export async function askAll(url: string, python: LinePeer | undefined): Promise<Outcomes> {
  const ofPython = python?.ask<Outcomes>({ url, asked: { ...ASKED, long_answer: LONG_ANSWER } });
  const outcomes: Record<string, Record<string, Outcome>> = {};
  for (const [name, cases] of Object.entries(CLIENTS))
    outcomes[name] = await outcomesOf(cases(url));
  return { ...outcomes, ...(await ofPython) };
}
