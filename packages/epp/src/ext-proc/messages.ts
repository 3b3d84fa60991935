import { status as GrpcStatus } from "@grpc/grpc-js";
import { DECODE_ROUTES, ENDPOINTS, type Endpoint, whyRefused } from "@kv/fleet/front-end";
import { refusedRequest } from "@kv/http";
import { KvError } from "@kv/interface";

/** Messages of `proto/ext_proc.proto` as `@grpc/proto-loader` reads and writes them. */

interface HeaderValue {
  readonly key: string;
  readonly value?: string;
  readonly raw_value?: Buffer;
}

export interface StructValue {
  readonly stringValue?: string;
  readonly listValue?: { readonly values?: readonly StructValue[] };
}

export interface Struct {
  readonly fields?: Readonly<Record<string, StructValue>>;
}

export interface HttpHeaders {
  readonly headers?: { readonly headers?: readonly HeaderValue[] };
  readonly end_of_stream?: boolean;
}

export interface HttpBody {
  readonly body?: Buffer;
  readonly end_of_stream?: boolean;
}

export interface ProcessingRequest {
  readonly request_headers?: HttpHeaders;
  readonly response_headers?: HttpHeaders;
  readonly request_body?: HttpBody;
  readonly response_body?: HttpBody;
  readonly request_trailers?: object;
  readonly response_trailers?: object;
  readonly metadata_context?: { readonly filter_metadata?: Readonly<Record<string, Struct>> };
  readonly attributes?: Readonly<Record<string, Struct>>;
  readonly observability_mode?: boolean;
  readonly protocol_config?: {
    readonly request_body_mode?: number;
    readonly response_body_mode?: number;
  };
}

export type ProcessingResponse = object;

const FULL_DUPLEX_STREAMED = 4;
const BODY_MODES = [
  "NONE",
  "STREAMED",
  "BUFFERED",
  "BUFFERED_PARTIAL",
  "FULL_DUPLEX_STREAMED",
  "GRPC",
];

/** Envoy's documentation recommends at most this for a body response. */
const CHUNK_BYTES = 64 * 1024;

/** Repeated values are joined by commas, as in Node. */
export function headersOf(message: HttpHeaders): Record<string, string> {
  const headers = Object.create(null) as Record<string, string>;
  for (const { key, value, raw_value: raw } of message.headers?.headers ?? []) {
    const text = raw === undefined || raw.length === 0 ? (value ?? "") : raw.toString("latin1");
    const before = headers[key];
    headers[key] = before === undefined ? text : `${before}, ${text}`;
  }
  return headers;
}

/** Reads a list, or one text with commas. */
export function metadataTexts(
  { metadata_context: context }: ProcessingRequest,
  namespace: string,
  key: string,
): string[] | undefined {
  const value = context?.filter_metadata?.[namespace]?.fields?.[key];
  if (value === undefined) return undefined;
  return (value.listValue?.values ?? [value])
    .flatMap(({ stringValue = "" }) => stringValue.split(","))
    .map((text) => text.trim())
    .filter((text) => text !== "");
}

/**
 * `ip:port` of the instance that served, if the gateway's `response_attributes` name
 * `upstream.address`.
 */
export function upstreamAddress({ attributes }: ProcessingRequest): string | undefined {
  for (const { fields } of Object.values(attributes ?? {})) {
    const address = fields?.["upstream.address"]?.stringValue;
    if (address !== undefined) return address;
  }
  return undefined;
}

export function headerMutation(
  set: Readonly<Record<string, string>>,
  remove: readonly string[] = [],
): object {
  return {
    set_headers: Object.entries(set).map(([key, value]) => ({
      header: { key, raw_value: Buffer.from(value, "latin1") },
      append_action: 2,
    })),
    remove_headers: remove,
  };
}

export function* bodyResponses(
  direction: "request_body" | "response_body",
  bytes: Buffer,
  end: boolean,
): Generator<ProcessingResponse> {
  // An end without bytes is a piece too.
  for (let at = 0; at < bytes.length || (end && at === 0); at += CHUNK_BYTES) {
    const body = bytes.subarray(at, at + CHUNK_BYTES);
    const streamed_response = { body, end_of_stream: end && at + CHUNK_BYTES >= bytes.length };
    yield { [direction]: { response: { body_mutation: { streamed_response } } } };
  }
}

export function isGeneration(path: string): path is Endpoint {
  return (ENDPOINTS as readonly string[]).includes(path);
}

class WrongUse extends Error {}

/** @throws `WrongUse` if the gateway would not send the whole body, or not take it back. */
export function requireFullDuplex(message: ProcessingRequest): void {
  const {
    request_headers: headers,
    protocol_config: config,
    observability_mode: observes,
  } = message;
  if (observes === true)
    throw new WrongUse("observability_mode is set: the picker cannot answer then");
  const { request_body_mode: request = 0, response_body_mode: response = 0 } = config ?? {};
  // A request without a body needs no body mode.
  const isRequestRight =
    config === undefined || request === FULL_DUPLEX_STREAMED || headers?.end_of_stream === true;
  if (isRequestRight && (response === 0 || response === FULL_DUPLEX_STREAMED)) return;
  const [wrong, mode] = isRequestRight ? ["response", response] : ["request", request];
  throw new WrongUse(
    `${wrong}_body_mode is ${BODY_MODES[mode] ?? mode}; set processing_mode.${wrong}_body_mode to FULL_DUPLEX_STREAMED`,
  );
}

export function grpcError(thrown: unknown): object {
  const isWrongUse = thrown instanceof WrongUse;
  return {
    code: isWrongUse ? GrpcStatus.FAILED_PRECONDITION : GrpcStatus.INTERNAL,
    details: isWrongUse
      ? thrown.message
      : KvError.from(thrown, "KV_INTERNAL", "the picker failed").message,
  };
}

/** @throws `KV_REQUEST_INVALID` (404, 405) for what no instance serves. */
export function requireServed(method: string, path: string): void {
  const isModels = path === "/v1/models" || path.startsWith("/v1/models/");
  const isPost = isGeneration(path) || DECODE_ROUTES.includes(path);
  if (isPost ? method === "POST" : isModels && (method === "GET" || method === "HEAD")) return;
  if (isPost || isModels) throw refusedRequest(405, `${method} is not served at this path`);
  const why = whyRefused(method, path);
  throw refusedRequest(
    404,
    `this path is not served${why === undefined ? "" : `: ${why}`}`,
    `served are ${ENDPOINTS.join(", ")}, /v1/models, and what a decode instance answers alone, such as /tokenize`,
  );
}

export function endpointLabel(path: string): string {
  if (isGeneration(path)) return path;
  return path.startsWith("/v1/models") ? "/v1/models" : "other";
}

const PARTS = [
  "response_headers",
  "response_body",
  "response_trailers",
  "request_headers",
  "request_body",
  "request_trailers",
] as const;
export type MessagePart = (typeof PARTS)[number];

/**
 * Checks the order of messages: headers, body, trailers, of the request and then of the answer.
 * Parts may be absent. Envoy may send a second, empty end of a body (envoy#46237), and its own
 * answer before the request has ended.
 */
export class MessageOrder {
  readonly #request = { hasBegun: false, hasEnded: false };
  readonly #answer = { hasBegun: false, hasEnded: false };

  /**
   * The part that a message brings; undefined for a message to ignore.
   * @throws `WrongUse` for one out of order.
   */
  partIn(message: ProcessingRequest): MessagePart | undefined {
    const part = PARTS.find((name) => message[name] !== undefined);
    if (part === undefined) return undefined;
    const isAnswer = part.startsWith("response");
    const progress = isAnswer ? this.#answer : this.#request;
    const of = isAnswer ? "response" : "request";
    const isHeaders = part === `${of}_headers`;
    const { body, end_of_stream: isLast }: HttpBody = message[part] ?? {};
    if (!this.#request.hasBegun && (isAnswer || !isHeaders)) throw first(part, "request");
    if (isHeaders && progress.hasBegun) throw new WrongUse(`${part} came twice in one stream`);
    if (!isHeaders && !progress.hasBegun) throw first(part, of);
    if (!isHeaders && !isAnswer && this.#answer.hasBegun) return undefined;
    if (progress.hasEnded) {
      if (part === `${of}_body` && (body?.length ?? 0) === 0) return undefined;
      throw new WrongUse(`${part} came after the end of the ${of}`);
    }
    progress.hasBegun = true;
    progress.hasEnded = isLast === true || part === `${of}_trailers`;
    return part;
  }
}

function first(part: string, of: string): WrongUse {
  return new WrongUse(
    `${part} came before ${of}_headers; set processing_mode.${of}_header_mode to SEND`,
  );
}
