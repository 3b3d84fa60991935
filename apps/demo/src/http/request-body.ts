import { z } from "zod";
import { httpError } from "./error-response.js";

const MAX_ENTRIES = 4096;
const MAX_SHOWN = 100;

/** One check for a whole prompt: a schema per token would report each of a million wrong ones. */
const prompt = z.custom<string | number[] | (string | number[])[]>(
  (value) =>
    isPrompt(value) ||
    (Array.isArray(value) && value.length <= MAX_ENTRIES && value.every(isPrompt)),
  "must be text, a list of token ids, or a list of these",
);
/** Stop strings of a request, and characters of each: every token is compared with all of them. */
const MAX_STOPS = 64;
const stopString = z.string().max(1000);
const params = z.record(z.string(), z.unknown());

/** A list whose entries are looked at only when it is not too long. */
function entries<T>(schema: z.ZodType<T>) {
  return z.array(z.unknown()).max(MAX_ENTRIES).pipe(z.array(schema));
}

function isPrompt(value: unknown): value is string | number[] {
  return (
    typeof value === "string" ||
    (Array.isArray(value) && value.length > 0 && value.every(isTokenId))
  );
}

function isTokenId(value: unknown): value is number {
  return Number.isSafeInteger(value) && (value as number) >= 0;
}

function shown(value: unknown): string {
  const text =
    typeof value === "string" ? JSON.stringify(value.slice(0, MAX_SHOWN)) : JSON.stringify(value);
  return text.length > MAX_SHOWN ? `${text.slice(0, MAX_SHOWN)}…` : text;
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
  stop: z
    .union([stopString, z.array(z.unknown()).max(MAX_STOPS).pipe(z.array(stopString))])
    .nullish(),
  stop_token_ids: entries(z.number().int()).nullish(),
  return_token_ids: z.boolean().nullish(),
  kv_transfer_params: params.nullish(),
  /**
   * The demo's negative control: zero the n-th block of the prompt when its KV has arrived. Only
   * with `debug`.
   */
  demo_zero_block: z.number().int().nonnegative().nullish(),
};

export const completionSchema = z.looseObject({
  ...shared,
  prompt,
  logprobs: z.number().int().min(0).max(20).nullish(),
});

const part = z.looseObject({ type: z.literal("text"), text: z.string() });
const message = z.looseObject({ role: z.string(), content: z.union([z.string(), entries(part)]) });

export const chatSchema = z.looseObject({
  ...shared,
  messages: entries(message).refine((messages) => messages.length > 0, "must not be empty"),
  max_completion_tokens: z.number().int().min(1).nullish(),
  logprobs: z.boolean().nullish(),
  top_logprobs: z.number().int().min(0).max(20).nullish(),
});

export type CompletionBody = z.output<typeof completionSchema>;
export type ChatBody = z.output<typeof chatSchema>;

/**
 * Fields that this engine does not support, with the values that have no effect; any other value is
 * refused.
 */
const UNSUPPORTED: Readonly<Record<string, (value: unknown) => boolean>> = {
  n: (value) => value === 1,
  best_of: (value) => value === 1,
  echo: (value) => value === false,
  suffix: (value) => value === "",
  min_tokens: (value) => value === 0 || value === 1,
  prompt_logprobs: () => false,
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
    const [first] = parsed.error.issues;
    const problems = new z.ZodError(parsed.error.issues.slice(0, 10));
    throw httpError(
      400,
      `the body is not valid: ${z.prettifyError(problems)}`,
      first?.path.join("."),
    );
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

/**
 * Characters of a text per token that it may have: far more than any text has, so that nothing
 * large is tokenized in vain.
 */
const MAX_CHARACTERS_PER_TOKEN = 64;

/**
 * Refuses a text that is too long for the model before it is tokenized.
 * @throws `KV_REQUEST_INVALID`.
 */
export function checkTextLength(characters: number, maxModelLen: number, param: string): void {
  const limit = maxModelLen * MAX_CHARACTERS_PER_TOKEN;
  if (characters <= limit) return;
  throw httpError(
    400,
    `the text has ${characters} characters; a model of ${maxModelLen} tokens takes ${limit}`,
    param,
  );
}

export function charactersOf({ messages }: ChatBody): number {
  const texts = messages.flatMap(({ content }) =>
    typeof content === "string" ? [content] : content.map(({ text }) => text),
  );
  return texts.reduce((sum, text) => sum + text.length, 0);
}

/**
 * The prompt that `kv_transfer_params.prompt_token_ids` names, as in vLLM: a chat's decode request
 * may repeat the tokens that the prefill worker computed, and its messages are then not tokenized.
 * Undefined without the key.
 * @throws `KV_REQUEST_INVALID`.
 */
export function transferredPrompt({
  kv_transfer_params: given,
}: ChatBody): readonly number[] | undefined {
  const tokens = given?.["prompt_token_ids"];
  if (tokens === undefined || tokens === null) return undefined;
  if (Array.isArray(tokens) && isPrompt(tokens)) return tokens as number[];
  throw httpError(
    400,
    `kv_transfer_params.prompt_token_ids is ${shown(tokens)}; it must be a list of token ids`,
    "kv_transfer_params",
  );
}

export function onePrompt(prompt: CompletionBody["prompt"]): string | readonly number[] {
  if (typeof prompt === "string") return prompt;
  const first = prompt[0];
  if (typeof first === "number") return prompt as number[];
  if (prompt.length === 1 && first !== undefined) return first as string | number[];
  throw httpError(
    400,
    `the body has ${prompt.length} prompts; send one request for each`,
    "prompt",
  );
}
