import type { Log } from "@kv/interface";
import { chooseTransport, type TransportName } from "../cluster/choose-transport.js";
import { startCluster } from "../cluster/cluster.js";
import type { ClusterOptions } from "../cluster/cluster-plan.js";
import { loadModel } from "../model/model.js";
import type { LogLevel } from "../processes/json-log.js";
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
  readonly different: number;
}

export interface AccuracyReport {
  /** Every pair gives every answer of one engine, and the damaged control scores lower. */
  readonly ok: boolean;
  readonly questions: number;
  readonly reference: number;
  readonly pairs: readonly PairScore[];
  /** Pull, with one block of each prompt zeroed when it has arrived. */
  readonly control: PairScore;
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
/** The first token is the answer; the second shows that the engine continues from it. */
const MAX_TOKENS = 2;

export async function measureAccuracy(options: AccuracyOptions): Promise<AccuracyReport> {
  const { say } = options;
  const transport = await chooseTransport(options.transport, say);
  const model = await recallModel();
  const questions = questionSet(options.questions);
  say(`asking one engine ${questions.length} questions`);
  const expected = await answersOfOneEngine(questions, model);
  const measure = async (
    name: string,
    variant: Variant,
    zeroBlock?: number,
  ): Promise<PairScore> => {
    const answers = await answersOfPair(
      questions,
      { ...variant, transport, model },
      { ...options, zeroBlock },
    );
    const different = answers.filter((tokens, i) => !sameTokens(tokens, expected[i] ?? [])).length;
    const score = scoreOf(questions, answers);
    say(`${name}: score ${score.toFixed(3)}, ${different} answers differ from those of one engine`);
    return { name, score, different };
  };
  const reference = scoreOf(questions, expected);
  say(`one engine: score ${reference.toFixed(3)}`);
  const pairs: PairScore[] = [];
  for (const [name, variant] of Object.entries(PAIRS)) pairs.push(await measure(name, variant));
  const control = await measure("damaged control", {}, 1);
  const areEqual = pairs.every(({ different, score }) => different === 0 && score === reference);
  return {
    ok: areEqual && control.score < reference,
    questions: questions.length,
    reference,
    pairs,
    control,
  };
}

function scoreOf(questions: readonly Question[], answers: readonly (readonly number[])[]): number {
  return questions.filter(({ answer }, i) => answers[i]?.[0] === answer).length / questions.length;
}

async function answersOfOneEngine(
  questions: readonly Question[],
  directory: string,
): Promise<number[][]> {
  const model = await loadModel({ directory });
  try {
    const prompts = questions.map(({ promptTokens }) => promptTokens);
    return await referenceTokens(prompts, { model, maxTokens: MAX_TOKENS });
  } finally {
    await model.close();
  }
}

async function answersOfPair(
  questions: readonly Question[],
  variant: Variant & Pick<ClusterOptions, "transport">,
  {
    log,
    logLevel,
    zeroBlock,
  }: Pick<AccuracyOptions, "log" | "logLevel"> & { zeroBlock: number | undefined },
): Promise<(readonly number[])[]> {
  const usual = { connector: "NixlConnector", prefills: 1, decodes: 1, prefillTp: 1, decodeTp: 1 };
  const cluster = await startCluster(
    { ...usual, prefillBlockSize: 16, decodeBlockSize: 16, cacheTokens: 16_384, ...variant },
    { log, logLevel },
  );
  try {
    const { url } = cluster.proxy;
    return await Promise.all(
      questions.map(async ({ promptTokens }, i) => {
        const request = {
          url,
          requestId: `question-${i}`,
          promptTokens,
          maxTokens: MAX_TOKENS,
          zeroBlock,
        };
        return (await complete(request)).tokens;
      }),
    );
  } finally {
    await cluster.close();
  }
}

export function accuracyJson({ ok, questions, reference, pairs, control }: AccuracyReport): object {
  const shown = ({ name, score, different }: PairScore) => ({
    name,
    score,
    different_answers: different,
  });
  return {
    ok,
    questions,
    reference_score: reference,
    pairs: pairs.map(shown),
    damaged_control: shown(control),
  };
}

export function accuracyTable({
  ok,
  questions,
  reference,
  pairs,
  control,
}: AccuracyReport): string {
  const rows = [{ name: "one engine", score: reference, different: 0 }, ...pairs, control];
  const width = Math.max(...rows.map(({ name }) => name.length));
  const lines = rows.map(
    ({ name, score, different }) =>
      `${name.padEnd(width)}  ${score.toFixed(3)}  ${String(different).padStart(9)}`,
  );
  const verdict = ok
    ? `all ${questions} answers of every pair are those of one engine, and the damaged control scores lower`
    : "NOT all answers are those of one engine, or the damaged control does not score lower";
  return [`${"".padEnd(width)}  score  different`, ...lines, "", verdict, ""].join("\n");
}
