import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { KvError } from "@kv/interface";
import { buildOnnx } from "../model/onnx/build-onnx.js";
import { cachedDirectory, defaultCacheDirectory } from "../model/prepare-model.js";
import { readDecoderConfig } from "../model/weights/decoder-config.js";
import { type WeightSource, weightsOf } from "../model/weights/weights.js";

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
    const config = readDecoderConfig(CONFIG, { where: "recall" });
    await buildOnnx({ config, weights: recallWeights(), directory });
    await writeFile(join(directory, "config.json"), JSON.stringify(CONFIG, null, 2));
    const tokenizer = {
      tokenizer_class: "NumberedWordTokenizer",
      unk_token: "t0",
      eos_token: "t2",
    };
    await writeFile(join(directory, "tokenizer_config.json"), JSON.stringify(tokenizer));
  });
}

type Matrix = { readonly shape: readonly number[]; readonly data: Float32Array };

/** A matrix, row by row, with ones where `entries` says. */
function ones(
  rows: number,
  columns: number,
  entries: Iterable<readonly [row: number, column: number]>,
): Matrix {
  const data = new Float32Array(rows * columns);
  for (const [row, column] of entries) data[row * columns + column] = 1;
  return { shape: [rows, columns], data };
}

const upTo = (count: number): number[] => Array.from({ length: count }, (_, i) => i);

/**
 * The row of a subject in queries and keys: each head has a quarter of the subjects. Dimension 0 of
 * a head and its partner in the rotary embedding turn with every position, so they are left out.
 */
const rowOf = (subject: number): number =>
  Math.floor(subject / (SUBJECTS / HEADS)) * HEAD_DIM + 1 + (subject % (SUBJECTS / HEADS));

function recallWeights(): WeightSource {
  const subjects = upTo(SUBJECTS);
  const values = upTo(VALUES);
  const width = HEADS * HEAD_DIM;
  const embedding = ones(VOCAB, HIDDEN, [
    ...subjects.flatMap((subject) =>
      values.flatMap((value): [number, number][] => [
        [factToken(subject, value), FACT + subject],
        [factToken(subject, value), VALUE + value],
      ]),
    ),
    ...subjects.map((subject): [number, number] => [questionToken(subject), QUESTION + subject]),
    ...upTo(FILLERS.count).map((i): [number, number] => [FILLERS.first + i, FILLER + (i % 16)]),
  ]);
  const layer: Readonly<Record<string, Matrix>> = {
    "self_attn.q_proj": ones(
      width,
      HIDDEN,
      subjects.map((subject) => [rowOf(subject), QUESTION + subject]),
    ),
    "self_attn.k_proj": ones(
      width,
      HIDDEN,
      subjects.map((subject) => [rowOf(subject), FACT + subject]),
    ),
    "self_attn.v_proj": ones(
      width,
      HIDDEN,
      upTo(HEADS).flatMap((head) =>
        values.map((value): [number, number] => [head * HEAD_DIM + value, VALUE + value]),
      ),
    ),
    "self_attn.o_proj": ones(
      HIDDEN,
      width,
      upTo(HEADS).flatMap((head) =>
        values.map((value): [number, number] => [ANSWER + value, head * HEAD_DIM + value]),
      ),
    ),
    "mlp.gate_proj": ones(CONFIG.intermediate_size, HIDDEN, []),
    "mlp.up_proj": ones(CONFIG.intermediate_size, HIDDEN, []),
    "mlp.down_proj": ones(HIDDEN, CONFIG.intermediate_size, []),
  };
  const norm: Matrix = { shape: [HIDDEN], data: new Float32Array(HIDDEN).fill(1) };
  const head = ones(
    VOCAB,
    HIDDEN,
    values.map((value) => [answerToken(value), ANSWER + value]),
  );
  const weights = new Map<string, Matrix>([
    ["model.embed_tokens.weight", embedding],
    ["model.norm.weight", norm],
    ["lm_head.weight", head],
  ]);
  for (const index of upTo(LAYERS)) {
    const prefix = `model.layers.${index}`;
    for (const [name, matrix] of Object.entries(layer))
      weights.set(`${prefix}.${name}.weight`, matrix);
    for (const name of ["input_layernorm", "post_attention_layernorm"])
      weights.set(`${prefix}.${name}.weight`, norm);
  }
  return weightsOf(
    weights,
    (name) => new KvError("KV_MODEL_UNSUPPORTED", `there is no weight ${name}`),
  );
}

export interface Question {
  readonly promptTokens: readonly number[];
  readonly answer: number;
}

const FACTS = 24;
/** One question of so many has a prompt that states a wrong value, so that the score is not 1. */
const WRONG_EVERY = 8;

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
    for (const { position, subject, value } of facts)
      promptTokens[position] = factToken(subject, value);
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
