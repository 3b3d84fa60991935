import type { IncomingHttpHeaders } from "node:http";
import { AT_ONCE_BYTES, type LongMember, parseJsonPieces, shownValue, timesNamed } from "@kv/http";
import type { YieldingQueue } from "@kv/interface";
import { KvError, type Random } from "@kv/interface";

/** A path at which clients ask for generated text. The instances serve it under the same path. */
export type Endpoint =
  | "/v1/completions"
  | "/v1/chat/completions"
  | "/v1/responses"
  | "/v1/messages";

/**
 * What an answer contains about the prompt itself. A decode worker does not compute the prompt, so
 * the prompt's log probabilities are taken from the prefill answer. `prompt-logprobs`: the member
 * `prompt_logprobs`, in the choice (completions) or beside the choices (chat). `echo`: the prompt's
 * text and log probabilities before the choice's own (`echo` with `logprobs`, completions).
 * `prompt-only`: the prompt and nothing else (`echo` with `max_tokens` 0), which a prefill instance
 * answers alone.
 */
export type PromptFields = "none" | "prompt-logprobs" | "echo" | "prompt-only";

/** The part of a client's request that routing strategies read. */
export interface RoutedRequest {
  /**
   * The top-level members of the request's JSON body. A long list of token ids in `prompt` is an
   * `Int32Array`.
   */
  readonly fields: Readonly<Record<string, unknown>>;
  /**
   * The token ids of the prompt, where an instance has rendered it. A prompt of token ids needs
   * none.
   */
  readonly tokenIds?: ArrayLike<number> | undefined;
}

/**
 * A client's request for generated text, parsed as far as the proxy needs to split it into a
 * prefill and a decode leg.
 */
export interface GenerationRequest {
  /** The path. */
  readonly endpoint: Endpoint;
  /** The body as the client wrote it, without the members of `long`. */
  readonly text: string;
  /** Of a long body, the members that are long. */
  readonly long: readonly LongMember[];
  /** The body's top-level members. A long list of token ids in `prompt` is an `Int32Array`. */
  readonly fields: Readonly<Record<string, unknown>>;
  /** What an answer contains about the prompt itself. */
  readonly promptFields: PromptFields;
  /** The token ids of the prompt. Whoever has an instance render it sets them. */
  tokenIds?: ArrayLike<number> | undefined;
  /**
   * Why prefill and decode cannot run on two instances without a wrong answer; undefined where they
   * can.
   */
  readonly disaggregationLimit: string | undefined;
}

type Fields = Readonly<Record<string, unknown>>;

/** How a body was written, where it is passed on as it came. */
export interface WrittenBody {
  /** The body, or the part of it that has its short members. */
  readonly text: string;
  /** Top-level members that occur again outside of `text`. */
  readonly repeated?: ReadonlySet<string> | undefined;
}

const utf8 = new TextDecoder("utf-8", { fatal: true });

/**
 * Parses a client's body. Most of what an engine itself refuses is left to the engine.
 * @throws `KV_REQUEST_INVALID`.
 */
export function parseGenerationRequest(endpoint: Endpoint, body: Uint8Array): GenerationRequest {
  let text: string;
  let parsed: unknown;
  try {
    text = utf8.decode(body);
    parsed = JSON.parse(text);
  } catch (cause) {
    // V8's message repeats the begin of the text, which may be a prompt.
    const at = / at position (\d+)/.exec((cause as Error).message)?.[1];
    throw notJson(at === undefined ? "" : `, from character ${at} on`);
  }
  return requestOf(endpoint, parsed, { text, long: [] });
}

/**
 * As `parseGenerationRequest`. A body above `AT_ONCE_BYTES` is parsed in steps of `parses`: its
 * prompt stays in bytes, and no leg encodes it again. It must have passed a `JsonScan`.
 */
export async function parseRequestInSteps(
  endpoint: Endpoint,
  body: Uint8Array,
  parses: YieldingQueue,
): Promise<GenerationRequest> {
  if (body.length <= AT_ONCE_BYTES) return parseGenerationRequest(endpoint, body);
  const pieces = await parses.run(parseJsonPieces(body, { idsMember: "prompt" })).catch(() => {
    throw notJson();
  });
  return requestOf(endpoint, pieces.value, pieces);
}

/**
 * Checks a body that a decode instance gets as it came, for a route that it serves alone.
 * @throws `KV_REQUEST_INVALID`.
 */
export async function checkDecodeBody(body: Uint8Array, parses: YieldingQueue): Promise<void> {
  const pieces = await parses.run(parseJsonPieces(body)).catch(() => {
    throw notJson();
  });
  refuseConnectorMembers(pieces.value as Fields, pieces);
}

function notJson(where = ""): KvError {
  return new KvError("KV_REQUEST_INVALID", `the body is not JSON${where}`);
}

function requestOf(
  endpoint: Endpoint,
  parsed: unknown,
  written: WrittenBody & Pick<GenerationRequest, "long">,
): GenerationRequest {
  if (typeof parsed !== "object" || parsed === null || Array.isArray(parsed)) {
    throw new KvError("KV_REQUEST_INVALID", "the body must be a JSON object");
  }
  const fields = parsed as Record<string, unknown>;
  refuseConnectorMembers(fields, written);
  validateBody(fields);
  if (endpoint === "/v1/responses") checkRequestId(fields.request_id);
  return {
    endpoint,
    text: written.text,
    long: written.long,
    fields,
    promptFields: promptFieldsOf(endpoint, fields),
    disaggregationLimit: disaggregationLimit(endpoint, fields),
    tokenIds: undefined,
  };
}

/**
 * The token ids of a prompt as its client has written them; undefined for a prompt of another form.
 */
export function writtenIds({ fields: { prompt } }: RoutedRequest) {
  if (prompt instanceof Int32Array) return prompt;
  return Array.isArray(prompt) && typeof prompt[0] === "number"
    ? (prompt as readonly number[])
    : undefined;
}

/**
 * The token ids of a prompt: as its client has written them, or as an instance has rendered it;
 * undefined where they are not known.
 */
export function promptIds(request: RoutedRequest): ArrayLike<number> | undefined {
  return writtenIds(request) ?? request.tokenIds;
}

/** The body as it is sent: its text, or the pieces of a long one. */
export function bodyOf({ text, long }: GenerationRequest): RequestBody {
  return withLongMembers(text, long);
}

/** A body that is sent: text, or the pieces of a long one. */
export type RequestBody = string | readonly Uint8Array[];

/** The body of an object's text and of further members. The long ones are not copied. */
export function withLongMembers(text: string, long: readonly LongMember[]): RequestBody {
  if (long.length === 0) return text;
  const pieces: Uint8Array[] = [];
  let before = text.slice(0, -1);
  for (const { key, value } of long) {
    pieces.push(Buffer.from(`${before}${before === "{" ? "" : ","}${JSON.stringify(key)}:`), value);
    before = "";
  }
  pieces.push(Buffer.from("}"));
  return pieces;
}

/** Characters of the body; of the long members, bytes. */
export function bodyLength({ text, long }: GenerationRequest): number {
  return long.reduce((sum, { value }) => sum + value.length, text.length);
}

/**
 * The longest id of a client. Engines take 200 characters. The proxy adds the number of a part, and
 * in push a UUID and `-release`: 177 with the default limit of parts.
 */
export const REQUEST_ID_LENGTH = 128;

const REQUEST_ID = new RegExp(`^[\\x21-\\x2b\\x2d-\\x7e]{1,${REQUEST_ID_LENGTH}}$`);

/** What an id of a request must be. */
const REQUEST_ID_RULE = `1 to ${REQUEST_ID_LENGTH} printable ASCII characters without spaces and commas`;

/**
 * Whether a client may give a request this id. vLLM puts it into notifications, where a comma
 * separates ids, so the characters are limited.
 */
function isRequestId(id: string): boolean {
  return REQUEST_ID.test(id);
}

/**
 * The client's `X-Request-Id`, else a new id.
 * @throws `KV_REQUEST_INVALID`.
 */
export function requestIdOf(headers: IncomingHttpHeaders, random: Random): string {
  const id = headers["x-request-id"];
  if (id === undefined || id === "") return random.uuid();
  if (typeof id === "string" && isRequestId(id)) return id;
  throw new KvError("KV_REQUEST_INVALID", `X-Request-Id must be ${REQUEST_ID_RULE}`, {
    details: { param: "X-Request-Id", limit: "length of X-Request-Id" },
  });
}

/** The value of the `traceparent` header; undefined where there is none, or more than one. */
export function traceparentOf({ traceparent }: IncomingHttpHeaders): string | undefined {
  return typeof traceparent === "string" ? traceparent : undefined;
}

/**
 * vLLM's Responses API takes its request's id from the body, where the other ones take it from
 * `X-Request-Id`.
 */
function checkRequestId(id: unknown): void {
  if (id == null || (typeof id === "string" && isRequestId(id))) return;
  throw new KvError("KV_REQUEST_INVALID", `request_id must be ${REQUEST_ID_RULE}`, {
    details: { param: "request_id" },
  });
}

function promptFieldsOf(
  endpoint: Endpoint,
  fields: Readonly<Record<string, unknown>>,
): PromptFields {
  if (endpoint === "/v1/completions" && fields.echo === true) {
    if (fields.max_tokens === 0) return "prompt-only";
    if (fields.logprobs != null) return "echo";
  }
  if (endpoint === "/v1/responses" || endpoint === "/v1/messages") return "none";
  if (fields.prompt_logprobs != null) return "prompt-logprobs";
  // In a chat with echo, vLLM derives prompt_logprobs from `top_logprobs`, which is 0 by default.
  if (endpoint === "/v1/chat/completions" && fields.echo === true && fields.top_logprobs !== null)
    return "prompt-logprobs";
  return "none";
}

/**
 * Checks the members that the prefill leg replaces: it is not streamed and has a token limit of its
 * own. Without this check, the decode worker would refuse a wrong value only after the prefill
 * worker has computed the prompt and holds blocks for it. The rules are those of vLLM 0.33's
 * request models.
 * @throws `KV_REQUEST_INVALID`.
 */
function validateBody(fields: Fields): void {
  checkWholeNumbers(fields);
  checkBooleans(fields);
  const smallest = fields.echo === true ? 0 : 1;
  for (const param of ["max_tokens", "max_completion_tokens", "max_output_tokens"]) {
    const limit = fields[param];
    if (typeof limit === "number" && limit < smallest)
      refuse(param, `is ${limit}; it must be at least ${smallest}`);
  }
  if (typeof fields.n === "number" && fields.n < 1)
    refuse("n", `is ${fields.n}; it must be at least 1`);
  const limit = fields.max_completion_tokens ?? fields.max_tokens;
  const minTokens = fields.min_tokens;
  if (
    typeof limit === "number" &&
    typeof minTokens === "number" &&
    minTokens > Math.max(limit, 1)
  ) {
    refuse("min_tokens", `is ${minTokens}, above the token limit of ${limit}`);
  }
  checkStreaming(fields);
}

function checkWholeNumbers(fields: Fields): void {
  for (const param of [
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "n",
  ]) {
    const value = fields[param];
    if (value != null && !Number.isSafeInteger(value))
      refuse(param, `is ${shownValue(value)}; it must be a whole number`);
  }
}

/**
 * Checks the members that decide how a request is split. vLLM would also accept 1 and "yes" for
 * true.
 */
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
    if (typeof options !== "object" || Array.isArray(options))
      refuse("stream_options", "must be an object");
    if (stream !== true && Object.keys(options).length > 0)
      refuse("stream_options", "is only allowed with stream: true");
  }
  if (stream !== true) return;
  const { prompt_logprobs: promptLogprobs } = fields;
  if (typeof promptLogprobs === "number" && promptLogprobs !== 0)
    refuse("prompt_logprobs", "is not available with stream: true");
  if (fields.use_beam_search === true)
    refuse("use_beam_search", "is not available with stream: true");
}

function refuse(param: string, problem: string): never {
  throw new KvError("KV_REQUEST_INVALID", `${param} ${problem}`, { details: { param } });
}

/**
 * Names that reach an engine's KV connector, its encoder, or another host through them:
 * `kv_transfer_params` and `ec_transfer_params` (vLLM's request classes, 0.31 to 0.33), `kv_hints`
 * (its Rust front end), and what a later vLLM names in the same way.
 */
const CONNECTOR_MEMBER = /^(kv|ec)_|_transfer_params$/;

/**
 * Objects whose members vLLM reads those names from: `vllm_xargs` becomes
 * `SamplingParams.extra_args`, which its token route takes in `sampling_params`. Its clients write
 * further members into `extra_body`.
 */
const BAGS: ReadonlySet<string> = new Set([
  "vllm_xargs",
  "extra_args",
  "extra_body",
  "sampling_params",
]);

/** Whether a member of this name reaches an engine's connector. */
function isConnectorMember(name: string): boolean {
  return CONNECTOR_MEMBER.test(name);
}

/**
 * Refuses what only the proxy may tell an engine. A client that could name hosts and blocks would
 * read other requests' KV through a decode worker, and vLLM's engine ends when a value is no
 * object. `null` is nothing, as it is for vLLM. `written`: where the body is passed on as it came,
 * none of these members may occur twice, as another parser may take another one of them.
 * @throws `KV_REQUEST_INVALID`, with the member's name.
 */
export function refuseConnectorMembers(fields: Fields, written?: WrittenBody): void {
  for (const name in fields) {
    const isBag = BAGS.has(name);
    if (!isBag && !isConnectorMember(name)) continue;
    const value = fields[name];
    if (isBag) refuseInside(value, name);
    else if (value !== null) throw refusal(name);
    if (
      written?.repeated?.has(name) === true ||
      (written !== undefined && isNamedTwice(written.text, name))
    )
      throw new KvError("KV_REQUEST_INVALID", `${name} is given more than once`, {
        hint: `give ${name} once, or leave it out`,
        details: { param: name },
      });
  }
}

/** Refuses the names in a bag, with any value, and a bag inside of it. */
function refuseInside(bag: unknown, path: string): void {
  if (typeof bag !== "object" || bag === null) return;
  for (const name in bag)
    if (BAGS.has(name) || isConnectorMember(name)) throw refusal(`${path}.${name}`);
}

function refusal(path: string): KvError {
  const why =
    path === "kv_transfer_params"
      ? "the proxy sets it"
      : "it reaches the engine's connector, which the proxy controls";
  return new KvError("KV_REQUEST_INVALID", `a client must not set ${path}: ${why}`, {
    hint: `leave ${path} out of the body`,
    details: { param: path },
  });
}

/** Whether a name is a key twice, at any depth. Most texts have it once. */
function isNamedTwice(text: string, name: string): boolean {
  const mayBe = text.indexOf(name) !== text.lastIndexOf(name) || text.includes("\\u");
  return mayBe && timesNamed(text, name) > 1;
}

/**
 * Why prefill and decode of a request to `endpoint` cannot run on two instances without a wrong
 * answer (vLLM 0.32 and 0.33); undefined where they can.
 */
function disaggregationLimit(endpoint: string, fields: Fields): string | undefined {
  if (fields.use_beam_search === true) {
    return "use_beam_search runs several sequences, and only one reader can read the prefill worker's blocks";
  }
  if (typeof fields.best_of === "number" && fields.best_of > 1) {
    return `best_of is ${fields.best_of}, which chooses among copies in one server; vLLM no longer supports it`;
  }
  if (fields.prompt != null && fields.prompt_embeds != null && endpoint === "/v1/completions") {
    return "prompt and prompt_embeds are both given, so answers cannot be matched to prompts";
  }
  if (endpoint === "/v1/chat/completions" && fields.echo === true && fields.logprobs === true) {
    return "echo with logprobs in a chat needs the prompt computed by the server that generates";
  }
  return endpoint === "/v1/responses" ? responsesLimit(fields) : undefined;
}

/**
 * Parts of the Responses API that live in one server's memory, or that run several turns there:
 * each turn would read the blocks again.
 */
function responsesLimit(fields: Fields): string | undefined {
  for (const param of ["previous_response_id", "previous_input_messages", "prompt"]) {
    if (fields[param] != null)
      return `${param} refers to data that only the server that created it has`;
  }
  if (fields.background === true)
    return "background responses are kept by the server that runs them";
  const tools = Array.isArray(fields.tools) ? (fields.tools as { type?: unknown }[]) : [];
  const builtIn = tools.find((tool) => tool?.type !== "function");
  if (builtIn !== undefined) {
    return `the tool ${shownValue(builtIn?.type)} runs in the server, which then generates more than once`;
  }
  return undefined;
}
