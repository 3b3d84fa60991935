import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { seededRandom } from "@kv/transport-memory";
import { buildOnnx } from "../model/onnx/build-onnx.js";
import { cachedDirectory, defaultCacheDirectory } from "../model/prepare-model.js";
import { readDecoderConfig } from "../model/weights/decoder-config.js";
import { makeWeights } from "../model/weights/weights.js";

/** Raise it when the weights change: the directory of the model is cached under it. */
const VERSION = 1;

const SUBJECTS = 32;
const VALUES = 16;

const answerToken = (value: number): number => 16 + value;
const questionToken = (subject: number): number => 32 + subject;
const factToken = (subject: number, value: number): number => 64 + subject * VALUES + value;
const FILLERS = { first: 576, count: 64 } as const;

const HEADS = 4;
const HEAD_DIM = 32;
const LAYERS = 2;
const VOCAB = FILLERS.first + FILLERS.count;
/** Where a hidden state holds what: each entry is one of a one-hot vector. */
const FACT = 0;
const VALUE = FACT + SUBJECTS;
const QUESTION = VALUE + VALUES;
const ANSWER = QUESTION + SUBJECTS;
const FILLER = ANSWER + VALUES;
const HIDDEN = FILLER + 16;
const CONFIG = {
  architectures: ["Qwen3ForCausalLM"],
  model_type: "qwen3",
  vocab_size: VOCAB,
  hidden_size: HIDDEN,
  intermediate_size: 16,
  num_hidden_layers: LAYERS,
  num_attention_heads: HEADS,
  num_key_value_heads: HEADS,
  head_dim: HEAD_DIM,
  max_position_embeddings: 512,
  // So slow that a distance of hundreds of tokens does not turn a key away from its query.
  rope_theta: 1e30,
  rms_norm_eps: 1e-6,
  tie_word_embeddings: false,
  eos_token_id: 2,
};

/**
 * Writes a model that answers questions about facts in its prompt, with weights that are set by
 * hand: the head of a subject attends from the question to the fact, and copies its value. So the
 * answer depends on the KV of one token, anywhere in the prompt. Returns its directory.
 */
export function recallModel(): Promise<string> {
  return cachedDirectory(defaultCacheDirectory(), `recall-${VERSION}`, async (directory) => {
    const config = readDecoderConfig(CONFIG, "recall");
    await buildOnnx({ config, weights: makeWeights(config, recallMatrix), directory });
    await writeFile(join(directory, "config.json"), JSON.stringify(CONFIG, null, 2));
    const tokenizer = {
      tokenizer_class: "NumberedWordTokenizer",
      unk_token: "t0",
      eos_token: "t2",
    };
    await writeFile(join(directory, "tokenizer_config.json"), JSON.stringify(tokenizer));
  });
}

type Place = readonly [number, number];

const upTo = (count: number) => Array.from({ length: count }, (_, i) => i);
const subjects = upTo(SUBJECTS);
const values = upTo(VALUES);

/**
 * The row of a subject in queries and keys: each head has a quarter of the subjects. Dimension 0 of
 * a head and its partner in the rotary embedding turn with every position, so they are left out.
 */
const rowOf = (subject: number): number =>
  Math.floor(subject / (SUBJECTS / HEADS)) * HEAD_DIM + 1 + (subject % (SUBJECTS / HEADS));

const rowsOfValues = upTo(HEADS).flatMap((head) =>
  values.map((value) => ({ row: head * HEAD_DIM + value, value })),
);

/** By the last part of the weights' names. */
const ONES: Readonly<Record<string, readonly Place[]>> = {
  embed_tokens: [
    ...subjects.flatMap((subject) =>
      values.flatMap((value): Place[] => [
        [factToken(subject, value), FACT + subject],
        [factToken(subject, value), VALUE + value],
      ]),
    ),
    ...subjects.map((subject): Place => [questionToken(subject), QUESTION + subject]),
    ...upTo(FILLERS.count).map((i): Place => [FILLERS.first + i, FILLER + (i % 16)]),
  ],
  q_proj: subjects.map((subject) => [rowOf(subject), QUESTION + subject]),
  k_proj: subjects.map((subject) => [rowOf(subject), FACT + subject]),
  v_proj: rowsOfValues.map(({ row, value }) => [row, VALUE + value]),
  o_proj: rowsOfValues.map(({ row, value }) => [ANSWER + value, row]),
  lm_head: values.map((value) => [answerToken(value), ANSWER + value]),
};

function recallMatrix(name: string, [rows, columns]: Place): Float32Array {
  const data = new Float32Array(rows * columns);
  const [last = ""] = name.split(".").slice(-1);
  for (const [row, column] of ONES[last] ?? []) data[row * columns + column] = 1;
  return data;
}

export interface Question {
  readonly promptTokens: readonly number[];
  readonly answer: number;
}

const FACTS = 24;
/** One question of so many has a prompt that states a wrong value, so that the score is not 1. */
const WRONG_EVERY = 8;

export function questionSet(count: number): Question[] {
  const { integer: random } = seededRandom("questions 2");
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
    for (const { position, subject, value } of facts)
      promptTokens[position] = factToken(subject, value);
    const { subject, value } = facts[random(FACTS)] as (typeof facts)[number];
    promptTokens[length - 1] = questionToken(subject);
    const isWrong = index % WRONG_EVERY === WRONG_EVERY - 1;
    return { promptTokens, answer: answerToken(isWrong ? (value + 1) % VALUES : value) };
  });
}

function distinct(count: number, limit: number, random: (limit: number) => number): number[] {
  const found = new Set<number>();
  while (found.size < count) found.add(random(limit));
  return [...found];
}
