import type { Endpoint, GenerationRequest, PromptFields } from "@kv/fleet/front-end";

/**
 * What a member of a client's request is for, which decides the legs that get it. `prompt`: the tokens of the prompt, and its KV; both legs get it, as their prompts must be
 * equal token by token. `sampling`: which tokens are chosen; both legs, as P refuses a wrong value before it computes. `answer`: the form and the end of the answer; D alone.
 * `prompt-answer`: D alone, and P where what the answer says about the prompt comes from it. `proxy`: the proxy sets it in P's leg. `refused`: clients must not set it.
 */
export type MemberUse = "prompt" | "sampling" | "answer" | "prompt-answer" | "proxy" | "refused";

const MEMBERS: Readonly<Record<MemberUse, string>> = {
  prompt:
    "model prompt prompt_embeds suffix messages system input instructions previous_input_messages previous_response_id documents tools add_special_tokens " +
    "add_generation_prompt continue_final_message chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs truncate_prompt_tokens truncation_side truncation " +
    "reasoning reasoning_effort thinking output_config " +
    // The Kimi K3 renderer writes it into the prompt, and --exclude-tools-when-tool-choice-none makes "none" leave out the tools.
    "tool_choice " +
    "cache_salt session_id priority request_id vllm_xargs",
  sampling:
    "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty length_penalty logit_bias allowed_token_ids bad_words ignore_eos use_beam_search " +
    "watermarking",
  answer:
    "response_format structured_outputs text logprob_token_ids stop stop_token_ids stop_sequences include_stop_str_in_output stream_options stream_interval " +
    "repetition_detection thinking_token_budget parallel_tool_calls max_tool_calls include include_reasoning background metadata user service_tier prompt_cache_key " +
    "prompt_cache_options prompt_cache_retention safety_identifier enable_response_messages return_prompt_text return_token_offsets return_weight_versions " +
    "routed_experts_prompt_start mm_payload return_mm_kwargs",
  "prompt-answer":
    "echo logprobs top_logprobs prompt_logprobs return_tokens_as_token_ids return_token_ids skip_special_tokens spaces_between_special_tokens",
  proxy: "stream n max_tokens max_completion_tokens max_output_tokens min_tokens store",
  refused: "kv_transfer_params ec_transfer_params",
};

/** The members of vLLM's request classes, 0.31 to 0.33, by name. A test compares them with `vllmRequests` of `@kv/protocol`. */
export const REQUEST_MEMBERS: ReadonlyMap<string, MemberUse> = new Map(
  Object.entries(MEMBERS).flatMap(([use, names]) =>
    names.split(" ").map((name) => [name, use as MemberUse] as const),
  ),
);

/** Where a route has another use for a member. */
const OF_ROUTE: Readonly<Partial<Record<Endpoint, ReadonlyMap<string, MemberUse>>>> = {
  // The Kimi K3 renderer writes it into a chat's prompt.
  "/v1/chat/completions": new Map([["response_format", "prompt"]]),
};

/** What a member is for; undefined for one that no described vLLM has, which both legs get. */
export function memberUse(endpoint: Endpoint, name: string): MemberUse | undefined {
  return OF_ROUTE[endpoint]?.get(name) ?? REQUEST_MEMBERS.get(name);
}

const OF_THE_PROMPT: Readonly<Record<PromptFields, ReadonlySet<string>>> = {
  none: new Set(),
  "prompt-only": new Set(),
  "prompt-logprobs": new Set(["prompt_logprobs"]),
  echo: new Set([
    ...["echo", "logprobs", "prompt_logprobs", "return_tokens_as_token_ids", "return_token_ids"],
    ...["skip_special_tokens", "spaces_between_special_tokens"],
  ]),
};
/** In a chat with echo, vLLM derives `prompt_logprobs` from `top_logprobs`. */
const OF_A_CHAT_WITH_ECHO: ReadonlySet<string> = new Set(["echo", "top_logprobs", "prompt_logprobs"]);

/** The members of a request that P's leg does not get: it has one token, which nobody reads. */
export function leftOutOfPrefill({ endpoint, fields, promptFields }: GenerationRequest): string[] {
  const ofTheChat = endpoint === "/v1/chat/completions" && fields.echo === true;
  const kept = ofTheChat ? OF_A_CHAT_WITH_ECHO : OF_THE_PROMPT[promptFields];
  return Object.keys(fields).filter((name) => {
    const use = memberUse(endpoint, name);
    return use === "answer" || (use === "prompt-answer" && !kept.has(name));
  });
}
