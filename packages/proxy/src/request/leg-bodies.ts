import {
  type Endpoint,
  type GenerationRequest,
  type PromptFields,
  type RequestBody,
  withLongMembers,
} from "@kv/fleet/front-end";
import { editMembers, listElements, type MemberEdits, rawMember, shortened } from "@kv/http";
import { KvError } from "@kv/interface";

/** One prompt and one copy of a client's request, with their indices in the merged answer. */
export interface RequestPart {
  readonly request: GenerationRequest;
  readonly prompt: number;
  readonly copy: number;
}

/**
 * Splits a request into parts of one prompt and one copy each. A prefill worker answers with the KV
 * parameters of one prompt only, and frees its blocks when the first copy has read them (vLLM
 * 0.33), so each part has legs of its own. Copies have the seeds that vLLM gives them:
 * `seed + copy`. The prompts of a long list are not copied, and the search for them yields after
 * each piece. Errors: `KV_REQUEST_INVALID` above `limit` parts, and for several copies with a seed
 * that is not an integer.
 */
export function* splitRequest(
  request: GenerationRequest,
  limit: number,
  pieceBytes = 256 * 1024,
): Generator<undefined, readonly RequestPart[]> {
  const { fields } = request;
  const list = promptList(request);
  // The Messages API has no copies; vLLM ignores the member.
  const copies = typeof fields.n === "number" && request.endpoint !== "/v1/messages" ? fields.n : 1;
  const count = (list?.values.length ?? 1) * copies;
  if (count === 1 && list === undefined) return [{ request, prompt: 0, copy: 0 }];
  if (count > limit) {
    const message = `the body asks for ${count} answers (prompts times n); the limit is ${limit}`;
    throw new KvError("KV_REQUEST_INVALID", message, {
      hint: "send fewer in one request, or raise limits.parts",
    });
  }
  const seed = copies > 1 ? seedOf(request) : undefined;
  const replaced = [
    ...(list === undefined ? [] : [list.field]),
    ...(copies > 1 ? ["n"] : []),
    ...(seed === undefined ? [] : ["seed"]),
  ];
  // Edited once, and not for each part: the text may be long, and the parts many.
  const common = editMembers(request.text, { remove: replaced });
  const othersLong = request.long.filter(({ key }) => !replaced.includes(key));
  const longList = request.long.find(({ key }) => key === list?.field)?.value;
  const longPrompts =
    longList === undefined ? undefined : yield* listElements(longList, pieceBytes);
  const parts: RequestPart[] = [];
  for (let prompt = 0; prompt < (list?.values.length ?? 1); prompt += 1) {
    const changes: Record<string, unknown> = {};
    const members: string[] = [];
    if (list !== undefined) {
      changes[list.field] = list.values[prompt];
      if (longPrompts === undefined)
        members.push(`"${list.field}":${JSON.stringify(list.values[prompt])}`);
    }
    const value = longPrompts?.[prompt];
    const long =
      list === undefined || value === undefined
        ? othersLong
        : [...othersLong, { key: list.field, value }];
    if (copies > 1) {
      changes.n = 1;
      members.push('"n":1');
    }
    const fields = { ...request.fields, ...changes };
    for (let copy = 0; copy < copies; copy += 1) {
      const own = seed === undefined ? members : [...members, `"seed":${seed + BigInt(copy)}`];
      parts.push({
        request: { ...request, fields, text: withMembers(common, own), long },
        prompt,
        copy,
      });
    }
  }
  return parts;
}

function withMembers(text: string, members: readonly string[]): string {
  if (members.length === 0) return text;
  const before = text.slice(0, -1);
  return `${before}${before === "{" ? "" : ","}${members.join(",")}}`;
}

/**
 * The seed of the first copy, from its text: it may be larger than 2^53. vLLM also accepts 1.0 and
 * "1" as integers; unchanged, they would give all copies the same seed.
 */
function seedOf(request: GenerationRequest): bigint | undefined {
  const isLong = request.long.some(({ key }) => key === "seed");
  const seed = isLong ? "too long" : rawMember(request.text, "seed");
  if (seed === undefined || seed === "null") return undefined;
  if (/^-?[0-9]{1,40}$/.test(seed)) return BigInt(seed);
  const message = `seed is ${shortened(seed)}; with n above 1 it must be an integer of at most 40 digits`;
  throw new KvError("KV_REQUEST_INVALID", message, {
    hint: "write it in digits, without quotes and without a fraction",
    details: { param: "seed" },
  });
}

/**
 * The member that holds several prompts; undefined for one prompt, which may be a list of token
 * ids.
 */
function promptList({ endpoint, fields }: GenerationRequest) {
  if (endpoint !== "/v1/completions") return undefined;
  for (const field of ["prompt", "prompt_embeds"]) {
    const values: unknown = fields[field];
    if (Array.isArray(values) && values.length > 1 && typeof values[0] !== "number")
      return { field, values };
  }
  return undefined;
}

/**
 * `kv_transfer_params` that make a prefill worker keep the prompt's blocks for a decode worker to
 * read (vLLM 0.33, NixlConnector).
 */
export const KV_REQUEST_PULL =
  '{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,' +
  '"remote_host":null,"remote_port":null}';

/**
 * `kv_transfer_params` that make a prefill worker write the KV into a decode worker (vLLM 0.33,
 * NixlPushConnector).
 */
export const KV_REQUEST_PUSH =
  '{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,' +
  '"remote_host":null,"remote_port":null,"transfer_mode":"push"}';

/**
 * The body of the prefill leg: one token, not streamed, without what concerns the answer alone.
 * `kvTransferParams` (JSON text) make the worker keep the KV.
 */
export function prefillBody(
  request: GenerationRequest,
  kvTransferParams: string,
  requestId: string,
): RequestBody {
  const { fields, endpoint } = request;
  // With echo and a limit of 0, vLLM answers with the prompt alone. It generates a token all the
  // same, and keeps the blocks.
  const limit = request.promptFields === "echo" ? "0" : "1";
  const set: Record<string, string> = {
    stream: "false",
    kv_transfer_params: kvTransferParams,
    ...idMember(request, requestId),
  };
  set[endpoint === "/v1/responses" ? "max_output_tokens" : "max_tokens"] = limit;
  if (fields.max_completion_tokens != null) set.max_completion_tokens = limit;
  // vLLM refuses a minimum above the token limit.
  for (const minimum of ["min_tokens", "min_completion_tokens"]) {
    if (typeof fields[minimum] === "number" && fields[minimum] > Number(limit))
      set[minimum] = limit;
  }
  // Each further copy would keep blocks that no decode worker reads.
  if (fields.n != null) set.n = "1";
  if (endpoint === "/v1/responses") set.store = "false";
  if (endpoint === "/v1/messages" && isNamedTool(fields.tool_choice))
    set.stop_sequences = END_OF_ARGUMENTS;
  return edited(request, { remove: leftOutOfPrefill(request), set });
}

/**
 * With a named tool, vLLM 0.31 to 0.33 takes all text for the tool's arguments, and its Messages
 * API answers 400 where they are not JSON: of one token they are `{`. This ends the text before it,
 * and there is no call. Another `tool_choice` could change the prompt.
 */
const END_OF_ARGUMENTS = '["{"]';

function isNamedTool(choice: unknown): boolean {
  return (
    typeof choice === "object" && choice !== null && "type" in choice && choice.type === "tool"
  );
}

/** The client's body, with `kvTransferParams` as the prefill worker wrote them (JSON text). */
export function decodeBody(
  request: GenerationRequest,
  kvTransferParams: string,
  requestId: string,
): RequestBody {
  const set: Record<string, string> = {
    kv_transfer_params: kvTransferParams,
    ...idMember(request, requestId),
  };
  const remove: string[] = [];
  if (request.promptFields !== "none") remove.push("prompt_logprobs");
  if (request.promptFields === "echo") remove.push("echo");
  else if (request.endpoint === "/v1/chat/completions" && request.fields.echo === true)
    set.top_logprobs = "null";
  return edited(request, { remove, set });
}

/**
 * In push, vLLM matches the legs of a request by their ids, which come from `X-Request-Id`. Its
 * Responses API takes the id from the body instead, and makes one up where there is none (0.32 and
 * 0.33).
 */
function idMember(
  { endpoint, fields }: GenerationRequest,
  requestId: string,
): Record<string, string> {
  if (endpoint !== "/v1/responses" || fields.request_id != null) return {};
  return { request_id: JSON.stringify(`resp_${requestId}`) };
}

/**
 * The request with `suffix` behind the id that a client gives a response; others have none in their
 * body.
 */
export function withIdSuffix(request: GenerationRequest, suffix: string): GenerationRequest {
  const { endpoint, fields } = request;
  if (endpoint !== "/v1/responses" || typeof fields.request_id !== "string") return request;
  return withFields(request, { request_id: `${fields.request_id}${suffix}` });
}

export function withFields(
  request: GenerationRequest,
  values: Readonly<Record<string, unknown>>,
): GenerationRequest {
  const set = Object.fromEntries(
    Object.entries(values).map(([name, value]) => [name, JSON.stringify(value)]),
  );
  const long = request.long.filter(({ key }) => !Object.hasOwn(values, key));
  return {
    ...request,
    fields: { ...request.fields, ...values },
    text: editMembers(request.text, { set }),
    long,
  };
}

export function singleInstanceBody(request: GenerationRequest): RequestBody {
  return edited(request, { remove: ["kv_transfer_params"] });
}

function edited({ text, long }: GenerationRequest, edits: MemberEdits): RequestBody {
  const { remove = [], set = {} } = edits;
  const kept = long.filter(({ key }) => !remove.includes(key) && !Object.hasOwn(set, key));
  return withLongMembers(editMembers(text, edits), kept);
}

/**
 * The body of a request that makes a decode worker tell the prefill worker to free the blocks that
 * `kvTransferParams` names. vLLM refuses it before its engine sees it (beam search is not
 * streamed), and then notifies the prefill worker; no KV is read (vLLM 0.32 and 0.33,
 * `_with_kv_transfer_rejection_cleanup`). A server that serves it reads the blocks for one token,
 * which frees them too.
 */
export function releaseBody(model: unknown, kvTransferParams: string): string {
  const refused = { model, prompt: [0], max_tokens: 1, stream: true, use_beam_search: true };
  return editMembers(JSON.stringify(refused), { set: { kv_transfer_params: kvTransferParams } });
}

/**
 * What a member of a client's request is for, which decides the legs that get it. `prompt`: the
 * tokens of the prompt, and its KV; both legs get it, as their prompts must be equal token by
 * token. `sampling`: which tokens are chosen; both legs, as P refuses a wrong value before it
 * computes. `answer`: the form and the end of the answer; D alone. `prompt-answer`: D alone, and P
 * where what the answer says about the prompt comes from it. `proxy`: the proxy sets it in P's leg.
 * `refused`: clients must not set it.
 */
export type MemberUse = "prompt" | "sampling" | "answer" | "prompt-answer" | "proxy" | "refused";

const MEMBERS: Readonly<Record<MemberUse, string>> = {
  prompt:
    "model prompt prompt_embeds suffix messages system input instructions previous_input_messages previous_response_id documents tools add_special_tokens " +
    "add_generation_prompt continue_final_message chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs truncate_prompt_tokens truncation_side truncation " +
    "reasoning reasoning_effort thinking output_config " +
    // The Kimi K3 renderer writes it into the prompt, and --exclude-tools-when-tool-choice-none
    // makes "none" leave out the tools.
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

/**
 * The members of vLLM's request classes, 0.31 to 0.33, by name. A test compares them with
 * `vllmRequests` of `@kv/protocol`.
 */
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
    "echo",
    "logprobs",
    "prompt_logprobs",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
  ]),
};
/** In a chat with echo, vLLM derives `prompt_logprobs` from `top_logprobs`. */
const OF_A_CHAT_WITH_ECHO: ReadonlySet<string> = new Set([
  "echo",
  "top_logprobs",
  "prompt_logprobs",
]);

/** The members of a request that P's leg does not get: it has one token, which nobody reads. */
function leftOutOfPrefill({ endpoint, fields, promptFields }: GenerationRequest): string[] {
  const ofTheChat = endpoint === "/v1/chat/completions" && fields.echo === true;
  const kept = ofTheChat ? OF_A_CHAT_WITH_ECHO : OF_THE_PROMPT[promptFields];
  return Object.keys(fields).filter((name) => {
    const use = memberUse(endpoint, name);
    return use === "answer" || (use === "prompt-answer" && !kept.has(name));
  });
}
