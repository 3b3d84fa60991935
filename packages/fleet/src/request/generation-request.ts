import { type LongMember, parseJsonPieces } from "@kv/http";
import { KvError, type Turns } from "@kv/interface";
import { isRequestId, REQUEST_ID_RULE } from "../upstream/headers.js";
import { refuseConnectorMembers, type WrittenBody } from "./connector-members.js";
import { disaggregationLimit } from "./disaggregation-limits.js";
import { validateBody } from "./validate-body.js";

/** A path at which clients ask for generated text. The instances serve it under the same path. */
export type Endpoint = "/v1/completions" | "/v1/chat/completions" | "/v1/responses" | "/v1/messages";

/**
 * What an answer contains about the prompt itself. A decode worker does not compute the prompt, so the prompt's log probabilities are
 * taken from the prefill answer. `prompt-logprobs`: the member `prompt_logprobs`, in the choice (completions) or beside the choices
 * (chat). `echo`: the prompt's text and log probabilities before the choice's own (`echo` with `logprobs`, completions). `prompt-only`:
 * the prompt and nothing else (`echo` with `max_tokens` 0), which a prefill instance answers alone.
 */
export type PromptFields = "none" | "prompt-logprobs" | "echo" | "prompt-only";

/** A client's request for generated text, parsed as far as the proxy needs to split it into a prefill and a decode leg. */
export interface GenerationRequest {
  /** The path. */
  readonly endpoint: Endpoint;
  /** The body as the client wrote it, without the members of `long`. */
  readonly text: string;
  /** Of a long body, the members that are long. */
  readonly long: readonly LongMember[];
  /** The body's top-level members. */
  readonly fields: Readonly<Record<string, unknown>>;
  /** What an answer contains about the prompt itself. */
  readonly promptFields: PromptFields;
  /** The token ids of the prompt. Whoever has an instance render it sets them. */
  tokenIds?: ArrayLike<number> | undefined;
  /** Why prefill and decode cannot run on two instances without a wrong answer; undefined where they can. */
  readonly disaggregationLimit: string | undefined;
}

/** A longer body is parsed in pieces. */
const LONG_BODY_BYTES = 256 * 1024;

const utf8 = new TextDecoder("utf-8", { fatal: true });

/** Parses a client's body. Errors: `KV_REQUEST_INVALID`. Most of what an engine itself refuses is left to the engine. */
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

/** As `parseGenerationRequest`. A body above 256 KiB is parsed in pieces, each in a turn of its own. It must have passed a `JsonScan`. */
export async function parseRequestInTurns(
  endpoint: Endpoint,
  body: Uint8Array,
  turns: Turns,
): Promise<GenerationRequest> {
  if (body.length <= LONG_BODY_BYTES) return parseGenerationRequest(endpoint, body);
  const pieces = await turns.run(parseJsonPieces(body)).catch(() => {
    throw notJson();
  });
  return requestOf(endpoint, pieces.value, pieces);
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

/** vLLM's Responses API takes its request's id from the body, where the other ones take it from `X-Request-Id`. */
function checkRequestId(id: unknown): void {
  if (id == null || (typeof id === "string" && isRequestId(id))) return;
  throw new KvError("KV_REQUEST_INVALID", `request_id must be ${REQUEST_ID_RULE}`, {
    details: { param: "request_id" },
  });
}

function promptFieldsOf(endpoint: Endpoint, fields: Readonly<Record<string, unknown>>): PromptFields {
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
