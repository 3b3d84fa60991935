import { shownValue } from "@kv/http";
import { KvError } from "@kv/interface";

type Fields = Readonly<Record<string, unknown>>;

/**
 * Checks the members that the prefill leg replaces: it is not streamed and has a token limit of its own. Without this check, the decode
 * worker would refuse a wrong value only after the prefill worker has computed the prompt and holds blocks for it. The rules are those of
 * vLLM 0.33's request models. Errors: `KV_REQUEST_INVALID`.
 */
export function validateBody(fields: Fields): void {
  checkWholeNumbers(fields);
  checkBooleans(fields);
  const smallest = fields.echo === true ? 0 : 1;
  for (const param of ["max_tokens", "max_completion_tokens", "max_output_tokens"]) {
    const limit = fields[param];
    if (typeof limit === "number" && limit < smallest)
      refuse(param, `is ${limit}; it must be at least ${smallest}`);
  }
  if (typeof fields.n === "number" && fields.n < 1) refuse("n", `is ${fields.n}; it must be at least 1`);
  const limit = fields.max_completion_tokens ?? fields.max_tokens;
  const minTokens = fields.min_tokens;
  if (typeof limit === "number" && typeof minTokens === "number" && minTokens > Math.max(limit, 1)) {
    refuse("min_tokens", `is ${minTokens}, above the token limit of ${limit}`);
  }
  checkStreaming(fields);
}

function checkWholeNumbers(fields: Fields): void {
  for (const param of ["max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n"]) {
    const value = fields[param];
    if (value != null && !Number.isSafeInteger(value))
      refuse(param, `is ${shownValue(value)}; it must be a whole number`);
  }
}

/** Checks the members that decide how a request is split. vLLM would also accept 1 and "yes" for true. */
function checkBooleans(fields: Fields): void {
  for (const param of ["stream", "echo", "use_beam_search", "background"]) {
    const value = fields[param];
    if (value != null && typeof value !== "boolean")
      refuse(param, `is ${shownValue(value)}; it must be true or false`);
  }
}

function checkStreaming(fields: Fields): void {
  const { stream, stream_options: options } = fields;
  if (options != null) {
    if (typeof options !== "object" || Array.isArray(options)) refuse("stream_options", "must be an object");
    if (stream !== true && Object.keys(options).length > 0)
      refuse("stream_options", "is only allowed with stream: true");
  }
  if (stream !== true) return;
  const { prompt_logprobs: promptLogprobs } = fields;
  if (typeof promptLogprobs === "number" && promptLogprobs !== 0)
    refuse("prompt_logprobs", "is not available with stream: true");
  if (fields.use_beam_search === true) refuse("use_beam_search", "is not available with stream: true");
}

function refuse(param: string, problem: string): never {
  throw new KvError("KV_REQUEST_INVALID", `${param} ${problem}`, { details: { param } });
}
