import { KvError } from "@kv/interface";

type Fields = Readonly<Record<string, unknown>>;

/**
 * The prefill leg is not streamed and has a token limit of its own. A value that is wrong in one of the fields that it replaces would
 * only be refused by the decode worker, when the prefill worker has computed the prompt and holds blocks for it. The rules are vLLM's
 * (0.33, its request models). Errors: `KV_REQUEST_INVALID`.
 */
export function refuseWhatPrefillHides(fields: Fields): void {
  wholeNumbers(fields);
  booleans(fields);
  const smallest = fields.echo === true ? 0 : 1;
  for (const param of ["max_tokens", "max_completion_tokens", "max_output_tokens"]) {
    const limit = fields[param];
    if (typeof limit === "number" && limit < smallest)
      refuse(param, `is ${limit}; it must be at least ${smallest}`);
  }
  if (typeof fields.n === "number" && fields.n < 1) refuse("n", `is ${fields.n}; it must be at least 1`);
  const limit = fields.max_completion_tokens ?? fields.max_tokens;
  const least = fields.min_tokens;
  if (typeof limit === "number" && typeof least === "number" && least > Math.max(limit, 1)) {
    refuse("min_tokens", `is ${least} and the limit of tokens is ${limit}; it must not be larger`);
  }
  streaming(fields);
}

function wholeNumbers(fields: Fields): void {
  for (const param of ["max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n"]) {
    const value = fields[param];
    if (value != null && !Number.isSafeInteger(value))
      refuse(param, `is ${JSON.stringify(value)}; it must be a whole number`);
  }
}

/** What decides how a request is parted. vLLM takes 1 and "yes" for true. */
function booleans(fields: Fields): void {
  for (const param of ["stream", "echo", "use_beam_search", "background"]) {
    const value = fields[param];
    if (value != null && typeof value !== "boolean")
      refuse(param, `is ${JSON.stringify(value)}; it must be true or false`);
  }
}

function streaming(fields: Fields): void {
  const { stream, stream_options: options } = fields;
  if (options != null) {
    if (typeof options !== "object" || Array.isArray(options)) refuse("stream_options", "must be an object");
    if (stream !== true && Object.keys(options).length > 0)
      refuse("stream_options", "goes with stream: true only");
  }
  if (stream !== true) return;
  const asked = fields.prompt_logprobs;
  if (typeof asked === "number" && asked !== 0)
    refuse("prompt_logprobs", "is not available with stream: true");
  if (fields.use_beam_search === true) refuse("use_beam_search", "is not available with stream: true");
}

function refuse(param: string, what: string): never {
  throw new KvError("KV_REQUEST_INVALID", `${param} ${what}`, { details: { param } });
}
