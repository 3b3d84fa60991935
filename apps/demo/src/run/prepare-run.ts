import type { Transport } from "@kv/interface";
import { memoryTransport } from "@kv/transport-memory";
import { BlockPool } from "../engine/cache/block-pool.js";
import { KvPool } from "../engine/cache/kv-pool.js";
import { Engine } from "../engine/engine.js";
import { loadModel, type Model } from "../model/model.js";
import { loadTokenizer } from "../model/tokenizer/tokenizer.js";
import { madePrompts, readPrompts, writtenPrompts } from "./prompts.js";

export interface PrepareRunOptions {
  readonly model?: string;
  readonly tinyKvHeads?: number;
  readonly promptsFile?: string;
  /** As many as the file has when absent, else 4. */
  readonly requests?: number;
  readonly maxTokens: number;
}

/** A text that comes to fewer different tokens is one of unknown words. */
const FEW_TOKENS = 8;

export interface PreparedRun {
  readonly prompts: readonly (readonly number[])[];
  /** Tokens of each prompt. */
  readonly expected: readonly (readonly number[])[];
  /** A prompt more, for the negative control. */
  readonly control: { readonly promptTokens: readonly number[]; readonly expected: readonly number[] };
  readonly modelName: string;
}

/** Prompts, and what one engine in this process makes of them. The model goes before the servers load theirs. */
export async function prepareRun(
  given: PrepareRunOptions,
  say: (line: string) => void,
): Promise<PreparedRun> {
  const { maxTokens, promptsFile, requests } = given;
  const model = await loadModel({
    onProgress: say,
    ...(given.model === undefined ? {} : { directory: given.model }),
    ...(given.tinyKvHeads === undefined ? {} : { tinyKvHeads: given.tinyKvHeads }),
  });
  const transport = memoryTransport();
  try {
    const { vocabSize, maxModelLen, directory, name } = model.config;
    const room = maxModelLen - maxTokens;
    const tokenizer = await loadTokenizer({ directory, vocabSize });
    const file = promptsFile === undefined ? undefined : await readPrompts(promptsFile, tokenizer);
    const count = requests ?? file?.length ?? 4;
    const options = { count: count + 1, vocabSize, maxTokens: room };
    const written = writtenPrompts(options, tokenizer);
    // The built-in model has learnt nothing, and knows none of these words: any tokens will do.
    const knowsWords = new Set(written[0]).size >= FEW_TOKENS;
    const made = knowsWords ? written : madePrompts(options);
    const prompts = Array.from(
      { length: count },
      (_, i) => (file ?? made)[i % (file?.length ?? made.length)] ?? [],
    );
    const control = made[count] ?? [];
    say(`computing ${prompts.length} prompts with ${name} in this process, to compare with`);
    const all = await referenceTokens([...prompts, control], { model, transport, maxTokens });
    return {
      prompts,
      expected: all.slice(0, count),
      control: { promptTokens: control, expected: all[count] ?? [] },
      modelName: name,
    };
  } finally {
    await model.close();
    await transport.close();
  }
}

export interface ReferenceOptions {
  readonly model: Model;
  readonly transport: Transport;
  readonly maxTokens: number;
}

/** The tokens that one engine in one process makes of each prompt, greedily: what the pair must say too. */
export async function referenceTokens(
  prompts: readonly (readonly number[])[],
  { model, transport, maxTokens }: ReferenceOptions,
): Promise<number[][]> {
  const { layers, kvHeads, headDim } = model.config;
  const blockSize = 16;
  const longest = Math.max(...prompts.map((prompt) => prompt.length));
  // One at a time, and nothing from a cache: the plainest way to compute them.
  const numBlocks = Math.ceil((longest + maxTokens) / blockSize) + 2;
  const pool = new KvPool({
    transport,
    geometry: { layers, kvHeads, headDim },
    numBlocks,
    blockSize,
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
