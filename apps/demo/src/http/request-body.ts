import { z } from "zod";
import type { Tokenizer } from "../model/tokenizer/tokenizer.js";
import { httpError } from "./error-response.js";

const MAX_ENTRIES = 4096;
const MAX_SHOWN = 100;

function isPrompt(value: unknown): value is string | number[] {
  return (
    typeof value === "string" ||
    (Array.isArray(value) && value.length > 0 && value.every(isTokenId))
  );
}

function isTokenId(value: unknown): value is number {
  return Number.isSafeInteger(value) && (value as number) >= 0;
}

/** One check for a whole prompt: a schema per token would report each of a million wrong ones. */
const prompt = z.custom<string | number[] | (string | number[])[]>(
  (value) =>
    isPrompt(value) ||
    (Array.isArray(value) && value.length <= MAX_ENTRIES && value.every(isPrompt)),
  "must be text, a list of token ids, or a list of these",
);
/** A list whose entries are looked at only when it is not too long. */
function entries<T>(schema: z.ZodType<T>) {
  return z.array(z.unknown()).max(MAX_ENTRIES).pipe(z.array(schema));
}

/** Fields of both endpoints. Other fields are ignored, as in vLLM. */
const shared = {
  model: z.string().nullish(),
  max_tokens: z.number().int().min(1).nullish(),
  temperature: z.number().min(0).max(100).nullish(),
  top_p: z.number().gt(0).max(1).nullish(),
  top_k: z.number().int().min(-1).nullish(),
  seed: z.number().int().nullish(),
  stream: z.boolean().nullish(),
  stream_options: z.looseObject({ include_usage: z.boolean().nullish() }).nullish(),
  ignore_eos: z.boolean().nullish(),
  stop_token_ids: entries(z.number().int()).nullish(),
  return_token_ids: z.boolean().nullish(),
  kv_transfer_params: z.record(z.string(), z.unknown()).nullish(),
  /**
   * The negative control, with `debug`: zero the n-th block of the prompt when its KV has arrived.
   */
  demo_zero_block: z.number().int().nonnegative().nullish(),
};

export const completionSchema = z.looseObject({
  ...shared,
  prompt,
});

const part = z.looseObject({ type: z.literal("text"), text: z.string() });
const message = z.looseObject({ role: z.string(), content: z.union([z.string(), entries(part)]) });

export const chatSchema = z.looseObject({
  ...shared,
  messages: entries(message).refine((messages) => messages.length > 0, "must not be empty"),
  max_completion_tokens: z.number().int().min(1).nullish(),
});

export type CompletionBody = z.output<typeof completionSchema>;
export type ChatBody = z.output<typeof chatSchema>;

/** Unsupported fields, with the values that have no effect; any other value is refused. */
const UNSUPPORTED: Readonly<Record<string, (value: unknown) => boolean>> = {
  n: (value) => value === 1,
  best_of: (value) => value === 1,
  echo: (value) => value === false,
  suffix: (value) => value === "",
  min_tokens: (value) => value === 0 || value === 1,
  logprobs: (value) => value === false,
  top_logprobs: (value) => value === 0,
  prompt_logprobs: () => false,
  stop: (value) => value === "" || (Array.isArray(value) && value.length === 0),
  frequency_penalty: (value) => value === 0,
  presence_penalty: (value) => value === 0,
  repetition_penalty: (value) => value === 1,
  logit_bias: (value) =>
    typeof value === "object" && value !== null && Object.keys(value).length === 0,
  use_beam_search: (value) => value === false,
  response_format: (value) => (value as { type?: unknown }).type === "text",
  tools: (value) => Array.isArray(value) && value.length === 0,
};

/**
 * Validates a parsed body.
 * @throws `KV_REQUEST_INVALID` naming each invalid field, or the first unsupported one.
 */
export function validateBody<T>(schema: z.ZodType<T>, body: unknown): T {
  const parsed = schema.safeParse(body);
  if (!parsed.success) {
    const problems = parsed.error.issues.slice(0, 10);
    const text = z.prettifyError(new z.ZodError(problems));
    throw httpError(400, `the body is not valid: ${text}`, problems[0]?.path.join("."));
  }
  for (const [field, hasNoEffect] of Object.entries(UNSUPPORTED)) {
    const value = (parsed.data as Record<string, unknown>)[field];
    if (value === undefined || value === null || hasNoEffect(value)) continue;
    throw httpError(
      400,
      `${field} is ${shown(value)}, which this engine does not support; leave it out`,
      field,
    );
  }
  return parsed.data;
}

function shown(value: unknown): string {
  const text =
    typeof value === "string" ? JSON.stringify(value.slice(0, MAX_SHOWN)) : JSON.stringify(value);
  return text.length > MAX_SHOWN ? `${text.slice(0, MAX_SHOWN)}…` : text;
}

/** @throws `KV_REQUEST_INVALID` for several prompts, and for a text that is too long. */
export function completionPrompt(
  { prompt }: CompletionBody,
  tokenizer: Tokenizer,
  maxModelLen: number,
): readonly number[] {
  const [first] = prompt;
  const isOne = typeof prompt === "string" || typeof first === "number";
  if (!isOne && prompt.length !== 1) {
    throw httpError(
      400,
      `the body has ${prompt.length} prompts; send one request for each`,
      "prompt",
    );
  }
  const one = (isOne ? prompt : first) as string | number[];
  if (typeof one !== "string") return one;
  checkTextLength(one.length, maxModelLen, "prompt");
  return Array.from(tokenizer.encode(one));
}

/**
 * As in vLLM, `kv_transfer_params.prompt_token_ids` may repeat the tokens that the prefill worker
 * computed, in place of the messages.
 * @throws `KV_REQUEST_INVALID`.
 */
export function chatPrompt(
  { messages, kv_transfer_params: params }: ChatBody,
  tokenizer: Tokenizer,
  maxModelLen: number,
): readonly number[] {
  const plain = messages.map(({ content, ...message }) => ({
    ...message,
    content: typeof content === "string" ? content : content.map(({ text }) => text).join(""),
  }));
  const characters = plain.reduce((sum, { content }) => sum + content.length, 0);
  checkTextLength(characters, maxModelLen, "messages");
  const tokens = params?.["prompt_token_ids"] ?? undefined;
  if (tokens === undefined) return Array.from(tokenizer.encodeChat(plain));
  if (Array.isArray(tokens) && isPrompt(tokens)) return tokens as number[];
  throw httpError(
    400,
    `kv_transfer_params.prompt_token_ids is ${shown(tokens)}; it must be a list of token ids`,
    "kv_transfer_params",
  );
}

/** Far more than any text has, so that nothing large is tokenized in vain. */
const MAX_CHARACTERS_PER_TOKEN = 64;

function checkTextLength(characters: number, maxModelLen: number, param: string): void {
  const limit = maxModelLen * MAX_CHARACTERS_PER_TOKEN;
  if (characters <= limit) return;
  throw httpError(
    400,
    `the text has ${characters} characters; a model of ${maxModelLen} tokens takes ${limit}`,
    param,
  );
}
