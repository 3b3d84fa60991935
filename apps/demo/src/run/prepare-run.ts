import type { Transport } from "@kv/interface";
import { memoryTransport } from "@kv/transport-memory";
import { BlockPool } from "../engine/cache/block-pool.js";
import { KvPool } from "../engine/cache/kv-pool.js";
import { Engine } from "../engine/engine.js";
import { loadModel, type Model } from "../model/model.js";
import { loadTokenizer } from "../model/tokenizer/tokenizer.js";
import { readPrompts, syntheticPrompts, textPrompts } from "./prompts.js";

export interface PrepareRunOptions {
  readonly model?: string | undefined;
  readonly tinyKvHeads?: number | undefined;
  readonly promptsFile?: string | undefined;
  /** Default: as many as the file has, or 4. */
  readonly requests?: number | undefined;
  readonly maxTokens: number;
}

/** A tokenizer that knows English encodes a text as at least this many different tokens. */
const MIN_DISTINCT_TOKENS = 8;

/** Prompts of the second round, at most. */
const MAX_WARM = 4;

export interface PreparedRun {
  readonly prompts: readonly (readonly number[])[];
  /** The reference tokens of each prompt. */
  readonly expected: readonly (readonly number[])[];
  /** Further prompts, for the second round. */
  readonly warm: {
    readonly prompts: readonly (readonly number[])[];
    readonly expected: readonly (readonly number[])[];
  };
  /** A further prompt, for the negative control. */
  readonly control: { readonly promptTokens: readonly number[]; readonly expected: readonly number[] };
  readonly modelName: string;
}

/** Chooses the prompts and computes their reference tokens in this process. The model is closed before the servers load theirs. */
export async function prepareRun(
  options: PrepareRunOptions,
  say: (line: string) => void,
): Promise<PreparedRun> {
  const { maxTokens, promptsFile, requests, tinyKvHeads } = options;
  const model = await loadModel({ onProgress: say, directory: options.model, tinyKvHeads });
  const transport = memoryTransport();
  try {
    const { vocabSize, maxModelLen, directory, name } = model.config;
    const tokenizer = await loadTokenizer({ directory, vocabSize });
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
    const all = await referenceTokens([...prompts, control, ...warm], { model, transport, maxTokens });
    return {
      prompts,
      expected: all.slice(0, count),
      control: { promptTokens: control, expected: all[count] ?? [] },
      warm: { prompts: warm, expected: all.slice(count + 1) },
      modelName: name,
    };
  } finally {
    await model.close();
    await transport.close();
  }
}

const REFERENCE_BLOCK_SIZE = 16;

/** The tokens that one engine in this process generates greedily from each prompt: one prompt at a time, without a prefix cache. */
export async function referenceTokens(
  prompts: readonly (readonly number[])[],
  { model, transport, maxTokens }: { model: Model; transport: Transport; maxTokens: number },
): Promise<number[][]> {
  const longest = Math.max(...prompts.map((prompt) => prompt.length));
  const numBlocks = Math.ceil((longest + maxTokens) / REFERENCE_BLOCK_SIZE) + 2;
  const pool = new KvPool({
    transport,
    geometry: model.config,
    numBlocks,
    blockSize: REFERENCE_BLOCK_SIZE,
    tp: 1,
  });
  const blocks = new BlockPool({ numBlocks, prefixCaching: false });
  const engine = new Engine({ model, pool, blocks });
  try {
    const all: number[][] = [];
    for (const [index, promptTokens] of prompts.entries()) {
      const request = { requestId: `reference-${index}`, promptTokens, maxTokens, ignoreEos: true };
      const { tokens } = await engine.submit(request).done;
      all.push(tokens.map(({ token }) => token));
    }
    return all;
  } finally {
    await engine.close();
    pool.close();
  }
}
