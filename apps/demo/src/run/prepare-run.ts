import { readFile } from "node:fs/promises";
import { KvError } from "@kv/interface";
import { memoryTransport } from "@kv/transport-memory";
import { BlockPool } from "../engine/cache/block-pool.js";
import { KvPool } from "../engine/cache/kv-pool.js";
import { Engine } from "../engine/engine.js";
import { loadModel, type Model } from "../model/model.js";
import { loadTokenizer, type Tokenizer } from "../model/tokenizer/tokenizer.js";

export interface PrepareRunOptions {
  readonly model?: string | undefined;
  readonly tinyKvHeads?: number | undefined;
  readonly promptsFile?: string | undefined;
  readonly requests?: number | undefined;
  readonly maxTokens: number;
}

/** A tokenizer that knows English encodes a text as at least this many different tokens. */
const MIN_DISTINCT_TOKENS = 8;

const MAX_WARM = 4;

/** Prompts, and the tokens that one engine in one process generates from each. */
export interface ExpectedPrompts {
  readonly prompts: readonly (readonly number[])[];
  readonly expected: readonly (readonly number[])[];
}

export interface PreparedRun extends ExpectedPrompts {
  readonly warm: ExpectedPrompts;
  readonly control: {
    readonly promptTokens: readonly number[];
    readonly expected: readonly number[];
  };
  readonly modelName: string;
}

/** The model is closed before the servers load theirs. */
export async function prepareRun(
  options: PrepareRunOptions,
  say: (line: string) => void,
): Promise<PreparedRun> {
  const { maxTokens, promptsFile, requests, tinyKvHeads } = options;
  await using model = await loadModel({ onProgress: say, directory: options.model, tinyKvHeads });
  const { vocabSize, maxModelLen, directory, name } = model.config;
  const tokenizer = await loadTokenizer(directory, vocabSize);
  const file = promptsFile === undefined ? undefined : await readPrompts(promptsFile, tokenizer);
  const count = requests ?? file?.length ?? 4;
  const warmCount = Math.min(count, MAX_WARM);
  const limits = { count: count + warmCount + 1, vocabSize, maxTokens: maxModelLen - maxTokens };
  const texts = textPrompts(limits, tokenizer);
  // The built-in model is not trained, and its tokenizer knows no English words.
  const knowsWords = options.model !== undefined && new Set(texts[0]).size >= MIN_DISTINCT_TOKENS;
  const generated = knowsWords ? texts : syntheticPrompts(limits);
  const source = file ?? generated;
  const prompts = Array.from({ length: count }, (_, i) => source[i % source.length] ?? []);
  const control = generated[count] ?? [];
  const warm = generated.slice(count + 1, count + 1 + warmCount);
  say(`computing the reference tokens of ${prompts.length} prompts with ${name} in this process`);
  const all = await referenceTokens([...prompts, control, ...warm], { model, maxTokens });
  return {
    prompts,
    expected: all.slice(0, count),
    control: { promptTokens: control, expected: all[count] ?? [] },
    warm: { prompts: warm, expected: all.slice(count + 1) },
    modelName: name,
  };
}

const REFERENCE_BLOCK_SIZE = 16;

/** The tokens of one engine, greedily, one prompt at a time, without a prefix cache. */
export async function referenceTokens(
  prompts: readonly (readonly number[])[],
  { model, maxTokens }: { model: Model; maxTokens: number },
): Promise<number[][]> {
  const longest = Math.max(...prompts.map((prompt) => prompt.length));
  const numBlocks = Math.ceil((longest + maxTokens) / REFERENCE_BLOCK_SIZE) + 2;
  await using transport = memoryTransport();
  const sizes = { numBlocks, blockSize: REFERENCE_BLOCK_SIZE, tp: 1 };
  const pool = new KvPool({ transport, geometry: model.config, ...sizes });
  const blocks = new BlockPool({ numBlocks });
  const engine = new Engine({ model, pool, blocks, prefixCaching: false });
  try {
    const all: number[][] = [];
    for (const [index, promptTokens] of prompts.entries()) {
      const request = { requestId: `reference-${index}`, promptTokens, maxTokens, ignoreEos: true };
      const { tokens } = await engine.submit(request).done;
      all.push([...tokens]);
    }
    return all;
  } finally {
    await engine.close();
    pool.close();
  }
}

export interface PromptOptions {
  readonly count: number;
  readonly vocabSize: number;
  readonly maxTokens: number;
}

/**
 * From a formula, of different lengths, and different from the first token on. This project's
 * comparisons with vLLM use the first one too.
 */
export function syntheticPrompts({ count, vocabSize, maxTokens }: PromptOptions): number[][] {
  const range = Math.min(1000, vocabSize - 24);
  return Array.from({ length: count }, (_, k) => {
    const length = Math.min(maxTokens, k === 0 ? 100 : 16 + ((k * 53) % 180));
    return Array.from(
      { length },
      (_, i) => ((((7 + k) * i * i + (3 + 2 * k) * i + 11 + 37 * k) % range) + 10) % vocabSize,
    );
  });
}

const TEXTS = [
  "Prefill and decode are the two phases of a language model's answer. In the first one",
  "A key-value cache keeps what attention has computed of the tokens so far. Without it",
  "Once upon a time, in a town by the sea, there lived an old clockmaker who",
  "The three most important rules for writing software that others can read are: first,",
  "Question: why is the sky blue in the day and red in the evening? Answer:",
  "To bake a loaf of bread you need flour, water, salt and yeast. Begin by",
];

/** English text for a trained model. */
function textPrompts({ count, maxTokens }: PromptOptions, tokenizer: Tokenizer): number[][] {
  return Array.from({ length: count }, (_, k) => {
    const texts = Array.from({ length: 1 + (k % 5) }, (_, i) => TEXTS[(k + i) % TEXTS.length]);
    return Array.from(tokenizer.encode(`${k + 1}. ${texts.join(" ")}`)).slice(0, maxTokens);
  });
}

/**
 * A line is text, a JSON string, or a JSON list of token ids.
 * @throws `KV_CONFIG_INVALID` with the line.
 */
async function readPrompts(path: string, tokenizer: Tokenizer): Promise<number[][]> {
  const invalid = (message: string, cause?: unknown) =>
    new KvError("KV_CONFIG_INVALID", message, { cause });
  const text = await readFile(path, "utf8").catch((cause: Error) => {
    throw invalid(`--prompts ${path} cannot be read: ${cause.message}`, cause);
  });
  const promptOf = (line: string, where: string): number[] => {
    let value: unknown = line;
    try {
      if (/^[["]/.test(line)) value = JSON.parse(line);
    } catch (cause) {
      const reason = (cause as Error).message;
      throw invalid(`${where} begins like JSON but is not valid: ${reason}`, cause);
    }
    if (typeof value === "string") return Array.from(tokenizer.encode(value));
    if (Array.isArray(value) && value.every((token) => Number.isInteger(token)))
      return value as number[];
    throw invalid(`${where} is neither a string nor a list of token ids`);
  };
  const prompts = text.split(/\r?\n/).flatMap((line, index) => {
    const trimmed = line.trim();
    return trimmed === "" ? [] : [promptOf(trimmed, `${path}:${index + 1}`)];
  });
  if (prompts.length === 0) throw invalid(`--prompts ${path} contains no prompt`);
  return prompts;
}
