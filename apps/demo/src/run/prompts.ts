import { readFile } from "node:fs/promises";
import { KvError } from "@kv/interface";
import type { Tokenizer } from "../model/tokenizer/tokenizer.js";

export interface PromptOptions {
  readonly count: number;
  readonly vocabSize: number;
  /** Limit of a prompt. */
  readonly maxTokens: number;
}

/**
 * Prompts of token ids from a formula, the same in every run. They have different lengths, some with full and some with partly filled last
 * blocks, and differ from the first token on. The first one is also used by this project's comparisons with vLLM.
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

/** Prompts of English text for a trained model, of different lengths and different from the first word on. */
export function textPrompts({ count, maxTokens }: PromptOptions, tokenizer: Tokenizer): number[][] {
  return Array.from({ length: count }, (_, k) => {
    const texts = Array.from({ length: 1 + (k % 5) }, (_, i) => TEXTS[(k + i) % TEXTS.length]);
    return Array.from(tokenizer.encode(`${k + 1}. ${texts.join(" ")}`)).slice(0, maxTokens);
  });
}

/** Reads a file with one prompt per line: text, a JSON string, or a JSON list of token ids. Errors: `KV_CONFIG_INVALID` with the line. */
export async function readPrompts(path: string, tokenizer: Tokenizer): Promise<number[][]> {
  let text: string;
  try {
    text = await readFile(path, "utf8");
  } catch (cause) {
    throw new KvError("KV_CONFIG_INVALID", `--prompts ${path} cannot be read: ${(cause as Error).message}`, {
      cause,
    });
  }
  const prompts = text
    .split(/\r?\n/)
    .map((line, index) => ({ line: line.trim(), number: index + 1 }))
    .filter(({ line }) => line !== "")
    .map(({ line, number }) => promptOf(line, `${path}:${number}`, tokenizer));
  if (prompts.length === 0) throw new KvError("KV_CONFIG_INVALID", `--prompts ${path} contains no prompt`);
  return prompts;
}

function promptOf(line: string, where: string, tokenizer: Tokenizer): number[] {
  if (!line.startsWith("[") && !line.startsWith('"')) return Array.from(tokenizer.encode(line));
  let value: unknown;
  try {
    value = JSON.parse(line);
  } catch (cause) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${where} begins like JSON but is not valid: ${(cause as Error).message}`,
      { cause },
    );
  }
  if (typeof value === "string") return Array.from(tokenizer.encode(value));
  if (Array.isArray(value) && value.every((token) => Number.isInteger(token))) return value as number[];
  throw new KvError("KV_CONFIG_INVALID", `${where} is neither a string nor a list of token ids`);
}
