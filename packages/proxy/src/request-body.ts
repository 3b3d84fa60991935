import { KvError } from "@kv/interface";

export type Endpoint = "/v1/completions" | "/v1/chat/completions";

/** A request to generate, read just far enough to know how it crosses the boundary between prefill and decode. */
export interface GenerationRequest {
  readonly endpoint: Endpoint;
  /** The body as the client wrote it. */
  readonly text: string;
  readonly fields: Readonly<Record<string, unknown>>;
  /** Why prefill and decode of it cannot be parted without a wrong answer; undefined where they can. */
  readonly unsplittable: string | undefined;
}

const utf8 = new TextDecoder("utf-8", { fatal: true });

/** Errors: `KV_REQUEST_INVALID`. What an engine would refuse anyway, and refuses well, is left to it. */
export function readRequest(endpoint: Endpoint, body: Uint8Array): GenerationRequest {
  let text: string;
  let fields: unknown;
  try {
    text = utf8.decode(body);
    fields = JSON.parse(text);
  } catch (cause) {
    throw new KvError("KV_REQUEST_INVALID", `the body is not JSON: ${(cause as Error).message}`, { cause });
  }
  if (typeof fields !== "object" || fields === null || Array.isArray(fields)) {
    throw new KvError("KV_REQUEST_INVALID", "the body must be a JSON object");
  }
  const request = fields as Record<string, unknown>;
  refuseForeignParams(request);
  refuseLengthsThatPrefillHides(request);
  return { endpoint, text, fields: request, unsplittable: unsplittable(endpoint, request) };
}

/** A client that could name blocks and hosts would read other requests' memory through the decode worker. */
function refuseForeignParams(fields: Record<string, unknown>): void {
  if (fields.kv_transfer_params == null) return;
  throw new KvError(
    "KV_REQUEST_INVALID",
    "kv_transfer_params is set by the proxy and not taken from a client",
    {
      hint: "leave kv_transfer_params out of the body",
      details: { param: "kv_transfer_params" },
    },
  );
}

/**
 * The prefill leg runs with a token limit of its own, so a limit that is wrong would only be refused by the decode worker, when
 * the prefill worker has computed the prompt and holds blocks for it.
 */
function refuseLengthsThatPrefillHides(fields: Record<string, unknown>): void {
  const smallest = fields.echo === true ? 0 : 1;
  for (const param of ["max_tokens", "max_completion_tokens"]) {
    const limit = fields[param];
    if (typeof limit === "number" && limit < smallest) {
      throw new KvError("KV_REQUEST_INVALID", `${param} is ${limit}; it must be at least ${smallest}`, {
        details: { param },
      });
    }
  }
  const limit = fields.max_completion_tokens ?? fields.max_tokens;
  const least = fields.min_tokens;
  if (typeof limit === "number" && typeof least === "number" && least > limit) {
    const message = `min_tokens is ${least} and the limit of tokens is ${limit}; it must not be larger`;
    throw new KvError("KV_REQUEST_INVALID", message, { details: { param: "min_tokens" } });
  }
}

function unsplittable(endpoint: Endpoint, fields: Record<string, unknown>): string | undefined {
  const prompts = countPrompts(fields);
  if (prompts > 1) {
    return `the body holds ${prompts} prompts, and a prefill worker answers with the KV of the first one only`;
  }
  for (const param of ["n", "best_of"]) {
    const copies = Number(fields[param] ?? 1);
    if (copies > 1) {
      return `${param} is ${copies}, and the prefill worker's blocks are there for one reader only`;
    }
  }
  if (fields.use_beam_search === true) {
    return "use_beam_search runs several sequences, and the prefill worker's blocks are there for one reader only";
  }
  if (fields.prompt_logprobs != null) {
    return "prompt_logprobs needs the prompt computed where the answer is made, and the decode worker does not compute it";
  }
  // vLLM 0.33 makes prompt_logprobs of `logprobs`, and in chat of `top_logprobs`, which is 0 by default.
  const echoesLogprobs =
    endpoint === "/v1/completions" ? fields.logprobs != null : fields.top_logprobs !== null;
  if (fields.echo === true && echoesLogprobs) {
    return "echo with log probabilities needs the prompt computed where the answer is made, and the decode worker does not compute it";
  }
  return undefined;
}

/** One for a string and for a list of token ids; as many as there are for a list of strings or of token lists. */
function countPrompts(fields: Record<string, unknown>): number {
  return count(fields.prompt) + count(fields.prompt_embeds);
}

function count(prompt: unknown): number {
  if (prompt == null) return 0;
  if (!Array.isArray(prompt)) return 1;
  return typeof prompt[0] === "number" ? 1 : prompt.length;
}
