import type { LogLevel } from "@kv/fleet/front-end";
import type { Log } from "@kv/interface";
import { chooseTransport, type TransportName } from "../cluster/choose-transport.js";
import { startCluster } from "../cluster/cluster.js";
import type { ClusterOptions } from "../cluster/cluster-plan.js";
import { loadModel } from "../model/model.js";
import { sameTokens } from "../run/check-run.js";
import { complete } from "../run/completion-client.js";
import { referenceTokens } from "../run/prepare-run.js";
import { type Question, questionSet, recallModel } from "./recall-model.js";

export interface AccuracyOptions {
  readonly transport?: TransportName | undefined;
  readonly questions: number;
  readonly say: (line: string) => void;
  readonly log: Log;
  readonly logLevel: LogLevel;
}

export interface PairScore {
  readonly name: string;
  readonly score: number;
  readonly different_answers: number;
}

export interface AccuracyReport {
  readonly ok: boolean;
  readonly questions: number;
  readonly reference_score: number;
  readonly pairs: readonly PairScore[];
  /** Pull, with one block of each prompt zeroed when it has arrived. */
  readonly damaged_control: PairScore;
}

type Variant = Partial<Omit<ClusterOptions, "transport">>;
const PAIRS: Readonly<Record<string, Variant>> = {
  pull: {},
  push: { connector: "push" },
  "push, layer by layer": { connector: "push", pushLayerwise: true },
  "Neuron staging on both sides": { prefillPlatform: "neuron", decodePlatform: "neuron" },
  "TP 1 to 2": { decodeTp: 2 },
  "TP 2 to 1": { prefillTp: 2 },
  "blocks 16 to 32": { decodeBlockSize: 32 },
  "blocks 32 to 16": { prefillBlockSize: 32 },
};
const MAX_TOKENS = 2;

export async function measureAccuracy(options: AccuracyOptions): Promise<AccuracyReport> {
  const { say } = options;
  const transport = await chooseTransport(options.transport, say);
  const model = await recallModel();
  const questions = questionSet(options.questions);
  const scoreOf = (answers: readonly (readonly number[])[]) =>
    questions.filter(({ answer }, i) => answers[i]?.[0] === answer).length / questions.length;
  say(`asking one engine ${questions.length} questions`);
  const expected = await answersOfOneEngine(questions, model);
  const reference = scoreOf(expected);
  say(`one engine: score ${reference.toFixed(3)}`);
  const measure = async (name: string, variant: Variant, zeroBlock?: number) => {
    const cluster = { ...variant, transport, model };
    const answers = await answersOfPair(questions, cluster, options, zeroBlock);
    const different = answers.filter((tokens, i) => !sameTokens(tokens, expected[i] ?? [])).length;
    const score = scoreOf(answers);
    say(`${name}: score ${score.toFixed(3)}, ${different} answers differ from those of one engine`);
    return { name, score, different_answers: different };
  };
  const pairs: PairScore[] = [];
  for (const [name, variant] of Object.entries(PAIRS)) pairs.push(await measure(name, variant));
  const control = await measure("damaged control", {}, 1);
  const areEqual = pairs.every(
    ({ different_answers, score }) => different_answers === 0 && score === reference,
  );
  return {
    ok: areEqual && control.score < reference,
    questions: questions.length,
    reference_score: reference,
    pairs,
    damaged_control: control,
  };
}

async function answersOfOneEngine(
  questions: readonly Question[],
  directory: string,
): Promise<number[][]> {
  await using model = await loadModel({ directory });
  const prompts = questions.map(({ promptTokens }) => promptTokens);
  return await referenceTokens(prompts, { model, maxTokens: MAX_TOKENS });
}

async function answersOfPair(
  questions: readonly Question[],
  variant: Variant & Pick<ClusterOptions, "transport">,
  { log, logLevel }: AccuracyOptions,
  zeroBlock: number | undefined,
): Promise<(readonly number[])[]> {
  const usual = { connector: "NixlConnector", prefills: 1, decodes: 1, prefillTp: 1, decodeTp: 1 };
  await using cluster = await startCluster(
    { ...usual, prefillBlockSize: 16, decodeBlockSize: 16, cacheTokens: 16_384, ...variant },
    { log, logLevel },
  );
  const { url } = cluster.proxy;
  const asked = questions.map(({ promptTokens }, i) => {
    const requestId = `question-${i}`;
    return complete({ url, requestId, promptTokens, maxTokens: MAX_TOKENS, zeroBlock });
  });
  return (await Promise.all(asked)).map(({ tokens }) => tokens);
}

export function accuracyTable(report: AccuracyReport): string {
  const { ok, questions, reference_score: score, pairs, damaged_control } = report;
  const rows = [{ name: "one engine", score, different_answers: 0 }, ...pairs, damaged_control];
  const width = Math.max(...rows.map(({ name }) => name.length));
  const lines = rows.map(
    ({ name, score, different_answers }) =>
      `${name.padEnd(width)}  ${score.toFixed(3)}  ${String(different_answers).padStart(9)}`,
  );
  const verdict = ok
    ? `all ${questions} answers of every pair are those of one engine, and the damaged control scores lower`
    : "NOT all answers are those of one engine, or the damaged control does not score lower";
  return [`${"".padEnd(width)}  score  different`, ...lines, "", verdict, ""].join("\n");
}
