import type { IncomingHttpHeaders } from "node:http";
import {
  AT_ONCE_BYTES,
  isObject,
  type LongMember,
  parseJsonPieces,
  shownValue,
  timesNamed,
} from "@kv/http";
import type { YieldingQueue } from "@kv/interface";
import { KvError, type Random } from "@kv/interface";
import type { Endpoint } from "./routes.js";

/** The part of a client's request that routing strategies read. */
export interface RoutedRequest {
  /** The body's top-level members. A long list of token ids in `prompt` is an `Int32Array`. */
  readonly fields: Fields;
  /** The prompt's token ids as an instance rendered them. A prompt of token ids needs none. */
  readonly tokenIds?: ArrayLike<number> | undefined;
}

/** A client's request for generated text, parsed as far as a split needs. */
export interface GenerationRequest extends RoutedRequest {
  readonly endpoint: Endpoint;
  /** As the client wrote it, without the members of `long`. */
  readonly text: string;
  readonly long: readonly LongMember[];
  /** Its answer tells of the prompt, which one instance computes and answers alone. */
  readonly asksAboutPrompt: boolean;
  tokenIds?: ArrayLike<number> | undefined;
  /** Makes the `remote_kv_source` (JSON text) that a sidecar's request names, for the leg that computes the prompt. */
  kvSource?: (() => string) | undefined;
  /** Why two instances would answer wrongly; else undefined. */
  readonly disaggregationLimit: string | undefined;
}

type Fields = Readonly<Record<string, unknown>>;

/** The text of a body that is passed on unchanged. */
export interface WrittenBody {
  readonly text: string;
  /** Top-level members that occur again outside of `text`. */
  readonly repeated?: ReadonlySet<string> | undefined;
}

const utf8 = new TextDecoder("utf-8", { fatal: true });

/**
 * Parses a client's body. It leaves most refusals to the engine.
 * @throws `KV_REQUEST_INVALID`.
 */
export function parseGenerationRequest(endpoint: Endpoint, body: Uint8Array): GenerationRequest {
  let text: string;
  let parsed: unknown;
  try {
    text = utf8.decode(body);
    parsed = JSON.parse(text);
  } catch (cause) {
    // V8's message repeats the text, which may be a prompt.
    const at = / at position (\d+)/.exec((cause as Error).message)?.[1];
    throw notJson(at === undefined ? "" : `, from character ${at} on`);
  }
  return requestOf(endpoint, parsed, { text, long: [] });
}

/**
 * As `parseGenerationRequest`, in steps of `parses` above `AT_ONCE_BYTES`. Long prompts stay in
 * bytes. The body must have passed a `JsonScan`.
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
 * Checks a body that passes unchanged to a decode instance.
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
  if (!isObject(parsed)) throw new KvError("KV_REQUEST_INVALID", "the body must be a JSON object");
  const fields = parsed;
  refuseConnectorMembers(fields, written);
  validateBody(fields);
  if (endpoint === "/v1/responses") checkRequestId(fields.request_id);
  return {
    endpoint,
    text: written.text,
    long: written.long,
    fields,
    asksAboutPrompt: asksAboutPrompt(endpoint, fields),
    disaggregationLimit: disaggregationLimit(endpoint, fields),
  };
}

/** Token ids that the client wrote; else undefined. */
export function writtenIds({ fields: { prompt } }: RoutedRequest) {
  if (prompt instanceof Int32Array) return prompt;
  return Array.isArray(prompt) && typeof prompt[0] === "number"
    ? (prompt as readonly number[])
    : undefined;
}

/** Token ids that the client wrote or an instance rendered; else undefined. */
export function promptIds(request: RoutedRequest): ArrayLike<number> | undefined {
  return writtenIds(request) ?? request.tokenIds;
}

/** `promptIds`; undefined for a salted prompt, whose blocks have other keys. */
export function unsaltedIds(request: RoutedRequest | undefined): ArrayLike<number> | undefined {
  if (request === undefined || request.fields.cache_salt != null) return undefined;
  return promptIds(request);
}

/** The body as the client wrote it. */
export function bodyOf({ text, long }: GenerationRequest): RequestBody {
  return withLongMembers(text, long);
}

/** A body to send: text, or the pieces of a long one. */
export type RequestBody = string | readonly Uint8Array[];

/** An object's text and further members, without copies of long ones. */
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

/** Characters, but bytes of long members. */
export function bodyLength({ text, long }: GenerationRequest): number {
  return long.reduce((sum, { value }) => sum + value.length, text.length);
}

/**
 * Longest id of a client. Engines take 200 characters; the proxy adds the number of a part, and in
 * push a UUID and `-release`: 177 with the default limit of parts.
 */
export const REQUEST_ID_LENGTH = 128;

const REQUEST_ID = new RegExp(`^[\\x21-\\x2b\\x2d-\\x7e]{1,${REQUEST_ID_LENGTH}}$`);

/** vLLM puts ids into notifications, separated by commas. */
const REQUEST_ID_RULE = `1 to ${REQUEST_ID_LENGTH} printable ASCII characters without spaces and commas`;

/**
 * The client's `X-Request-Id`, else a new id.
 * @throws `KV_REQUEST_INVALID`.
 */
export function requestIdOf(headers: IncomingHttpHeaders, random: Random): string {
  const id = headers["x-request-id"];
  if (id === undefined || id === "") return random.uuid();
  if (typeof id === "string" && REQUEST_ID.test(id)) return id;
  throw new KvError("KV_REQUEST_INVALID", `X-Request-Id must be ${REQUEST_ID_RULE}`, {
    details: { param: "X-Request-Id", limit: "length of X-Request-Id" },
  });
}

/** The `traceparent` header; undefined without exactly one. */
export function traceparentOf({ traceparent }: IncomingHttpHeaders): string | undefined {
  return typeof traceparent === "string" ? traceparent : undefined;
}

/** vLLM's Responses API takes the id from the body, not from `X-Request-Id`. */
function checkRequestId(id: unknown): void {
  if (id == null || (typeof id === "string" && REQUEST_ID.test(id))) return;
  throw new KvError("KV_REQUEST_INVALID", `request_id must be ${REQUEST_ID_RULE}`, {
    details: { param: "request_id" },
  });
}

/** The prompt's log probabilities, or the prompt alone (`echo` with `max_tokens` 0). */
function asksAboutPrompt(endpoint: Endpoint, fields: Fields): boolean {
  const { echo, prompt_logprobs: promptLogprobs } = fields;
  if (endpoint !== "/v1/completions" && endpoint !== "/v1/chat/completions") return false;
  if (promptLogprobs != null || echo !== true) return promptLogprobs != null;
  // For chats, vLLM derives prompt_logprobs from `top_logprobs`, by default 0.
  return endpoint === "/v1/completions"
    ? fields.max_tokens === 0 || fields.logprobs != null
    : fields.top_logprobs !== null;
}

/**
 * Checks members that the prefill leg replaces, by vLLM 0.33's request models. A decode worker
 * would refuse them only after the prefill worker computed the prompt and holds its blocks.
 * @throws `KV_REQUEST_INVALID`.
 */
function validateBody(fields: Fields): void {
  const least = fields.echo === true ? 0 : 1;
  const counts = [...LENGTH_LIMITS, "n", "min_tokens"];
  checkEach(fields, counts, Number.isSafeInteger, "a whole number");
  // vLLM would also accept 1 and "yes" for true.
  checkEach(fields, BOOLEANS, (value) => typeof value === "boolean", "true or false");
  checkEach(fields, LENGTH_LIMITS, (value) => Number(value) >= least, `at least ${least}`);
  checkEach(fields, ["n"], (value) => Number(value) >= 1, "at least 1");
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

const LENGTH_LIMITS = ["max_tokens", "max_completion_tokens", "max_output_tokens"];
const BOOLEANS = ["stream", "echo", "use_beam_search", "background"];

function checkEach(
  fields: Fields,
  params: readonly string[],
  is: (value: unknown) => boolean,
  what: string,
): void {
  for (const param of params) {
    const value = fields[param];
    if (value != null && !is(value)) refuse(param, `is ${shownValue(value)}; it must be ${what}`);
  }
}

function checkStreaming(fields: Fields): void {
  const { stream, stream_options: options } = fields;
  if (options != null && (typeof options !== "object" || Array.isArray(options)))
    refuse("stream_options", "must be an object");
  if (stream !== true) {
    if (Object.keys(options ?? {}).length > 0)
      refuse("stream_options", "is only allowed with stream: true");
    return;
  }
  const { prompt_logprobs: promptLogprobs } = fields;
  const withoutStream = "is not available with stream: true";
  if (typeof promptLogprobs === "number" && promptLogprobs !== 0)
    refuse("prompt_logprobs", withoutStream);
  if (fields.use_beam_search === true) refuse("use_beam_search", withoutStream);
}

function refuse(param: string, problem: string): never {
  throw new KvError("KV_REQUEST_INVALID", `${param} ${problem}`, { details: { param } });
}

/**
 * Names that reach an engine's KV connector, its encoder, or another host: `kv_transfer_params` and
 * `ec_transfer_params` (vLLM's request classes, 0.31 to 0.33), `kv_hints` (its Rust front end), and
 * similar later names.
 */
const CONNECTOR_MEMBER = /^(kv|ec)_|_transfer_params$/;

/**
 * vLLM also reads those names here: `vllm_xargs` becomes `SamplingParams.extra_args`, which its
 * token route takes in `sampling_params`. Its clients use `extra_body`.
 */
const BAGS: ReadonlySet<string> = new Set([
  "vllm_xargs",
  "extra_args",
  "extra_body",
  "sampling_params",
]);

/**
 * Refuses what only the proxy may tell an engine. A client that names hosts and blocks could read
 * others' KV through a decode worker, and vLLM's engine ends when a value is no object. `null`
 * counts as absent, as in vLLM. A body that passes unchanged (`written`) may have no such member
 * twice: another parser may take another one.
 * @throws `KV_REQUEST_INVALID`, with the member's name.
 */
export function refuseConnectorMembers(fields: Fields, written?: WrittenBody): void {
  for (const name in fields) {
    const isBag = BAGS.has(name);
    if (!isBag && !CONNECTOR_MEMBER.test(name)) continue;
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

function refuseInside(bag: unknown, path: string): void {
  if (typeof bag !== "object" || bag === null) return;
  for (const name in bag)
    if (BAGS.has(name) || CONNECTOR_MEMBER.test(name)) throw refusal(`${path}.${name}`);
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

function isNamedTwice(text: string, name: string): boolean {
  const mayBe = text.indexOf(name) !== text.lastIndexOf(name) || text.includes("\\u");
  return mayBe && timesNamed(text, name) > 1;
}

/** The error for a request that two instances would answer wrongly. */
export function cannotDisaggregate(why: string): KvError {
  const message = `prefill and decode of this request cannot run on two instances: ${why}`;
  return new KvError("KV_REQUEST_INVALID", message, {
    hint: "change the request; or start with --unsplittable decode-computes, which sends such requests to one decode instance",
  });
}

/** Why two instances would answer wrongly (vLLM 0.32 and 0.33); else undefined. */
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
  return endpoint === "/v1/responses" ? responsesLimit(fields) : undefined;
}

/**
 * Parts of the Responses API that live in one server or run several turns there, each of which
 * would read the blocks again.
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
