import { z } from "zod";
import { httpError } from "./error-response.js";

const tokenIds = z.array(z.number().int().nonnegative()).min(1);
const params = z.record(z.string(), z.unknown());

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
  stop_token_ids: z.array(z.number().int()).nullish(),
  return_token_ids: z.boolean().nullish(),
  kv_transfer_params: params.nullish(),
  /** The demo's negative control: zero the n-th block of the prompt when its KV has arrived. Only with `debug`. */
  kv_demo_zero_block: z.number().int().nonnegative().nullish(),
};

export const completionSchema = z.looseObject({
  ...shared,
  prompt: z.union([z.string(), tokenIds, z.array(z.union([z.string(), tokenIds]))]),
  logprobs: z.number().int().min(0).max(20).nullish(),
});

const part = z.looseObject({ type: z.literal("text"), text: z.string() });
const message = z.looseObject({ role: z.string(), content: z.union([z.string(), z.array(part)]) });

export const chatSchema = z.looseObject({
  ...shared,
  messages: z.array(message).min(1),
  max_completion_tokens: z.number().int().min(1).nullish(),
  logprobs: z.boolean().nullish(),
  top_logprobs: z.number().int().min(0).max(20).nullish(),
});

export type CompletionBody = z.output<typeof completionSchema>;
export type ChatBody = z.output<typeof chatSchema>;

/** Fields that this engine does not support, with the values that have no effect; any other value is refused. */
const UNSUPPORTED: Readonly<Record<string, (value: unknown) => boolean>> = {
  n: (value) => value === 1,
  best_of: (value) => value === 1,
  echo: (value) => value === false,
  suffix: (value) => value === "",
  stop: (value) => value === "" || (Array.isArray(value) && value.length === 0),
  min_tokens: (value) => value === 0 || value === 1,
  prompt_logprobs: () => false,
  frequency_penalty: (value) => value === 0,
  presence_penalty: (value) => value === 0,
  repetition_penalty: (value) => value === 1,
  logit_bias: (value) => typeof value === "object" && value !== null && Object.keys(value).length === 0,
  use_beam_search: (value) => value === false,
  response_format: (value) => (value as { type?: unknown }).type === "text",
  tools: (value) => Array.isArray(value) && value.length === 0,
};

/** Validates a body. Errors: `KV_REQUEST_INVALID` naming each invalid field, or the first unsupported one. */
export function readBody<T>(schema: z.ZodType<T>, body: unknown): T {
  const parsed = schema.safeParse(body);
  if (!parsed.success) {
    const [first] = parsed.error.issues;
    throw httpError(400, `the body is not valid: ${z.prettifyError(parsed.error)}`, first?.path.join("."));
  }
  for (const [field, hasNoEffect] of Object.entries(UNSUPPORTED)) {
    const value = (parsed.data as Record<string, unknown>)[field];
    if (value === undefined || value === null || hasNoEffect(value)) continue;
    throw httpError(
      400,
      `${field} is ${JSON.stringify(value)}, which this engine does not support; leave it out`,
      field,
    );
  }
  return parsed.data;
}

/** The prompt of a completion. Errors: `KV_REQUEST_INVALID` for several prompts. */
export function onePrompt(prompt: CompletionBody["prompt"]): string | readonly number[] {
  if (typeof prompt === "string") return prompt;
  const first = prompt[0];
  if (typeof first === "number") return prompt as number[];
  if (prompt.length === 1 && first !== undefined) return first as string | number[];
  throw httpError(400, `the body has ${prompt.length} prompts; send one request for each`, "prompt");
}
