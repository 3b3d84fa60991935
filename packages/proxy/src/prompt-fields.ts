import type { GenerationRequest } from "./request-body.js";

/**
 * What of the prompt itself an answer holds. The decode worker does not compute the prompt, so its log probabilities come from the
 * prefill worker's answer and are put into the decode worker's.
 */
export type PromptFields =
  | "none"
  /** `prompt_logprobs` in the choice (completions) or beside the choices (chat). */
  | "prompt-logprobs"
  /** The prompt's text and log probabilities before the choice's own: `echo` with `logprobs` (completions). */
  | "echo"
  /** The prompt and nothing else: `echo` with `max_tokens` 0. The prefill worker's answer is the answer. */
  | "prompt-only";

export function promptFieldsOf({ endpoint, fields }: GenerationRequest): PromptFields {
  if (endpoint === "/v1/completions" && fields.echo === true) {
    if (fields.max_tokens === 0) return "prompt-only";
    if (fields.logprobs != null) return "echo";
  }
  if (endpoint === "/v1/responses") return "none";
  if (fields.prompt_logprobs != null) return "prompt-logprobs";
  // In a chat vLLM makes prompt_logprobs of `top_logprobs`, which is 0 by default.
  if (endpoint === "/v1/chat/completions" && fields.echo === true && fields.top_logprobs !== null)
    return "prompt-logprobs";
  return "none";
}
