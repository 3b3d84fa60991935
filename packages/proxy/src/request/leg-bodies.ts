import {
  type Endpoint,
  type GenerationRequest,
  type RequestBody,
  withLongMembers,
} from "@kv/fleet/front-end";
import {
  editMembers,
  isObject,
  listElements,
  type MemberEdits,
  rawMember,
  shortened,
} from "@kv/http";
import { KvError } from "@kv/interface";

/** One prompt and one copy. The indices are those of the merged answer. */
export interface RequestPart {
  readonly request: GenerationRequest;
  readonly prompt: number;
  readonly copy: number;
}

/**
 * Splits a request into parts of one prompt and one copy. P answers with KV parameters of one
 * prompt and frees its blocks after the first read (vLLM 0.33), so each part needs its own legs.
 * Copies get vLLM's seeds, `seed + copy`. Long lists of prompts are not copied, and the search
 * yields after each piece. Errors: `KV_REQUEST_INVALID` above `limit` parts, or for several copies
 * with a seed that is no integer.
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
  // Edited once for all parts: the text may be long.
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
 * Read as text, because it may exceed 2^53. vLLM also takes 1.0 and "1" as integers; unchanged,
 * they would give all copies one seed.
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

/** Undefined for one prompt, which may be a list of token ids. */
function promptList({ endpoint, fields }: GenerationRequest) {
  if (endpoint !== "/v1/completions") return undefined;
  for (const field of ["prompt", "prompt_embeds"]) {
    const values: unknown = fields[field];
    if (Array.isArray(values) && values.length > 1 && typeof values[0] !== "number")
      return { field, values };
  }
  return undefined;
}

/** Make P keep the prompt's blocks for D to read (vLLM 0.33, NixlConnector). */
export const KV_REQUEST_PULL =
  '{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,' +
  '"remote_host":null,"remote_port":null}';

/** Make P write the KV into D (vLLM 0.33, NixlPushConnector). */
export const KV_REQUEST_PUSH =
  '{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,' +
  '"remote_host":null,"remote_port":null,"transfer_mode":"push"}';

/**
 * One token, not streamed, without members that concern only the answer. `kvTransferParams` and
 * `kvSource` are JSON text.
 */
export function prefillBody(
  request: GenerationRequest,
  kvTransferParams: string,
  requestId: string,
  kvSource = request.kvSource?.(),
): RequestBody {
  const { fields, endpoint } = request;
  const limit = "1";
  const set: Record<string, string> = {
    stream: "false",
    kv_transfer_params: withKvSource(kvSource, kvTransferParams),
    ...idMember(request, requestId),
  };
  set[endpoint === "/v1/responses" ? "max_output_tokens" : "max_tokens"] = limit;
  if (fields.max_completion_tokens != null) set.max_completion_tokens = limit;
  // vLLM refuses a minimum above the token limit.
  for (const minimum of ["min_tokens", "min_completion_tokens"]) {
    if (typeof fields[minimum] === "number" && fields[minimum] > 1) set[minimum] = limit;
  }
  // Further copies would keep blocks that no D reads.
  if (fields.n != null) set.n = "1";
  if (endpoint === "/v1/responses") set.store = "false";
  if (endpoint === "/v1/messages" && isNamedTool(fields.tool_choice))
    set.stop_sequences = END_OF_ARGUMENTS;
  return edited(request, { remove: leftOutOfPrefill(request), set });
}

/**
 * With a named tool, vLLM 0.31 to 0.33 takes all text as the tool's arguments, and its Messages API
 * answers 400 where they are no JSON, as in a single token `{`. Stopping before it yields no call.
 * Another `tool_choice` could change the prompt.
 */
const END_OF_ARGUMENTS = '["{"]';

function isNamedTool(choice: unknown): boolean {
  return isObject(choice) && choice.type === "tool";
}

/** `kvTransferParams` is JSON text as P wrote it. */
export function decodeBody(
  request: GenerationRequest,
  kvTransferParams: string,
  requestId: string,
): RequestBody {
  const set: Record<string, string> = {
    kv_transfer_params: kvTransferParams,
    ...idMember(request, requestId),
  };
  return edited(request, { set });
}

/**
 * In push, vLLM matches legs by ids made from `X-Request-Id`. Its Responses API takes the body's id
 * instead, or invents one (0.32 and 0.33).
 */
function idMember(
  { endpoint, fields }: GenerationRequest,
  requestId: string,
): Record<string, string> {
  if (endpoint !== "/v1/responses" || fields.request_id != null) return {};
  return { request_id: JSON.stringify(`resp_${requestId}`) };
}

/** Extends the id that a client gives a response. Other requests have none in the body. */
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
  const kvSource = request.kvSource?.();
  if (kvSource === undefined) return edited(request, { remove: ["kv_transfer_params"] });
  return edited(request, { set: { kv_transfer_params: withKvSource(kvSource, "{}") } });
}

/**
 * Adds the source of the KV of the prompt's start, named as in llm-d's sidecar. vLLM's
 * MultiConnector hands it to its OffloadingConnector.
 */
function withKvSource(kvSource: string | undefined, kvTransferParams: string): string {
  if (kvSource === undefined) return kvTransferParams;
  return editMembers(kvTransferParams, { set: { remote_kv_source: kvSource } });
}

function edited({ text, long }: GenerationRequest, edits: MemberEdits): RequestBody {
  const { remove = [], set = {} } = edits;
  const kept = long.filter(({ key }) => !remove.includes(key) && !Object.hasOwn(set, key));
  return withLongMembers(editMembers(text, edits), kept);
}

/**
 * A request whose refusal makes D tell P to free the blocks. vLLM refuses streamed beam search
 * before its engine sees it, then notifies P; no KV is read (vLLM 0.32 and 0.33,
 * `_with_kv_transfer_rejection_cleanup`). A server that serves it reads the blocks for one token,
 * which also frees them.
 */
export function releaseBody(model: unknown, kvTransferParams: string): string {
  const refused = { model, prompt: [0], max_tokens: 1, stream: true, use_beam_search: true };
  return editMembers(JSON.stringify(refused), { set: { kv_transfer_params: kvTransferParams } });
}

/**
 * Which legs get a member. `prompt`: both, because it shapes tokens or KV, and both prompts must be
 * equal. `sampling`: both, so that P refuses wrong values before it computes. `answer`: D. `proxy`: the
 * proxy sets it for P. `refused`: clients must not set it.
 */
export type MemberUse = "prompt" | "sampling" | "answer" | "proxy" | "refused";

const MEMBERS: Readonly<Record<MemberUse, string>> = {
  prompt:
    "model prompt prompt_embeds suffix messages system input instructions previous_input_messages previous_response_id documents tools add_special_tokens " +
    "add_generation_prompt continue_final_message chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs truncate_prompt_tokens truncation_side truncation " +
    "reasoning reasoning_effort thinking output_config " +
    // The Kimi K3 renderer puts it into the prompt. --exclude-tools-when-tool-choice-none makes
    // "none" drop the tools.
    "tool_choice " +
    "cache_salt session_id priority request_id vllm_xargs",
  sampling:
    "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty length_penalty logit_bias allowed_token_ids bad_words ignore_eos use_beam_search " +
    "watermarking",
  answer:
    "response_format structured_outputs text logprob_token_ids stop stop_token_ids stop_sequences include_stop_str_in_output stream_options stream_interval " +
    "repetition_detection thinking_token_budget parallel_tool_calls max_tool_calls include include_reasoning background metadata user service_tier prompt_cache_key " +
    "prompt_cache_options prompt_cache_retention safety_identifier enable_response_messages return_prompt_text return_token_offsets return_weight_versions " +
    "routed_experts_prompt_start mm_payload return_mm_kwargs " +
    "echo logprobs top_logprobs prompt_logprobs return_tokens_as_token_ids return_token_ids skip_special_tokens spaces_between_special_tokens",
  proxy: "stream n max_tokens max_completion_tokens max_output_tokens min_tokens store",
  refused: "kv_transfer_params ec_transfer_params",
};

/**
 * Members of vLLM's request classes, 0.31 to 0.33. A test compares them with `vllmRequests` of
 * `@kv/protocol`.
 */
export const REQUEST_MEMBERS: ReadonlyMap<string, MemberUse> = new Map(
  Object.entries(MEMBERS).flatMap(([use, names]) =>
    names.split(" ").map((name) => [name, use as MemberUse] as const),
  ),
);

const OF_ROUTE: Readonly<Partial<Record<Endpoint, ReadonlyMap<string, MemberUse>>>> = {
  // The Kimi K3 renderer puts it into a chat's prompt.
  "/v1/chat/completions": new Map([["response_format", "prompt"]]),
};

/** Undefined for a member that no described vLLM has; both legs get it. */
export function memberUse(endpoint: Endpoint, name: string): MemberUse | undefined {
  return OF_ROUTE[endpoint]?.get(name) ?? REQUEST_MEMBERS.get(name);
}

/** P's leg lacks members for its one token, which nobody reads. */
function leftOutOfPrefill({ endpoint, fields }: GenerationRequest): string[] {
  return Object.keys(fields).filter((name) => memberUse(endpoint, name) === "answer");
}
