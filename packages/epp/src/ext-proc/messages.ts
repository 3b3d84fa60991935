import { status as GrpcStatus } from "@grpc/grpc-js";
import { DECODE_ROUTES, ENDPOINTS, type Endpoint, whyRefused } from "@kv/fleet/front-end";
import { statusOf } from "@kv/http";
import { KvError } from "@kv/interface";

/**
 * The messages of `proto/ext_proc.proto` as `@grpc/proto-loader` reads and writes them. What Envoy
 * leaves out is undefined.
 */

/** A header of HTTP. */
interface HeaderValue {
  readonly key: string;
  readonly value?: string | undefined;
  readonly raw_value?: Buffer | undefined;
}

/** A value of `google.protobuf.Struct`. */
export interface StructValue {
  readonly stringValue?: string | undefined;
  readonly listValue?: { readonly values?: readonly StructValue[] | undefined } | undefined;
  readonly structValue?: Struct | undefined;
}

/** `google.protobuf.Struct`. */
export interface Struct {
  readonly fields?: Readonly<Record<string, StructValue>> | undefined;
}

/** `HttpHeaders`. */
export interface HttpHeaders {
  readonly headers?: { readonly headers?: readonly HeaderValue[] | undefined } | undefined;
  readonly end_of_stream?: boolean | undefined;
}

/** `HttpBody`, and `StreamedBodyResponse`. */
export interface HttpBody {
  readonly body?: Buffer | undefined;
  readonly end_of_stream?: boolean | undefined;
}

/** `ProcessingRequest`. */
export interface ProcessingRequest {
  readonly request_headers?: HttpHeaders | undefined;
  readonly response_headers?: HttpHeaders | undefined;
  readonly request_body?: HttpBody | undefined;
  readonly response_body?: HttpBody | undefined;
  readonly request_trailers?: object | undefined;
  readonly response_trailers?: object | undefined;
  readonly metadata_context?:
    | { readonly filter_metadata?: Readonly<Record<string, Struct>> | undefined }
    | undefined;
  readonly attributes?: Readonly<Record<string, Struct>> | undefined;
  readonly observability_mode?: boolean | undefined;
  readonly protocol_config?:
    | {
        readonly request_body_mode?: number | undefined;
        readonly response_body_mode?: number | undefined;
      }
    | undefined;
}

/** `ProcessingResponse`. */
export type ProcessingResponse = object;

/** `BodySendMode.FULL_DUPLEX_STREAMED`. */
const FULL_DUPLEX_STREAMED = 4;
const BODY_MODES = [
  "NONE",
  "STREAMED",
  "BUFFERED",
  "BUFFERED_PARTIAL",
  "FULL_DUPLEX_STREAMED",
  "GRPC",
];

/** The name of a `BodySendMode`. */
function bodyModeName(mode: number): string {
  return BODY_MODES[mode] ?? String(mode);
}

/** The largest chunk that Envoy's documentation recommends for a body response. */
const CHUNK_BYTES = 64 * 1024;

/**
 * HTTP headers by lower-case name; those of several lines joined by commas, as Node does. Envoy
 * sends the values as `raw_value`.
 */
export function headersOf(message: HttpHeaders): Record<string, string> {
  const headers: Record<string, string> = Object.create(null) as Record<string, string>;
  for (const { key, value, raw_value: raw } of message.headers?.headers ?? []) {
    const text = raw === undefined || raw.length === 0 ? (value ?? "") : raw.toString("latin1");
    const before = headers[key];
    headers[key] = before === undefined ? text : `${before}, ${text}`;
  }
  return headers;
}

/**
 * The texts of a metadata entry: a list, or one text with commas. Undefined where the entry is not
 * set.
 */
export function metadataTexts(
  { metadata_context: context }: ProcessingRequest,
  namespace: string,
  key: string,
): string[] | undefined {
  const value = context?.filter_metadata?.[namespace]?.fields?.[key];
  if (value === undefined) return undefined;
  const texts = value.listValue?.values?.map(({ stringValue }) => stringValue ?? "") ?? [
    value.stringValue ?? "",
  ];
  return texts
    .flatMap((text) => text.split(","))
    .map((text) => text.trim())
    .filter((text) => text !== "");
}

/**
 * `upstream.address`, where the gateway's `response_attributes` name it: `ip:port` of the instance
 * that has served.
 */
export function upstreamAddress({ attributes }: ProcessingRequest): string | undefined {
  for (const { fields } of Object.values(attributes ?? {})) {
    const address = fields?.["upstream.address"]?.stringValue;
    if (address !== undefined) return address;
  }
  return undefined;
}

/** `HeaderMutation`: sets headers in place of the client's, and removes others. */
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

/** The bytes of a body as `StreamedBodyResponse`s; the last one ends the body where `end`. */
export function* bodyResponses(
  direction: "request_body" | "response_body",
  bytes: Buffer,
  end: boolean,
): Generator<ProcessingResponse> {
  const pieces: Buffer[] = [];
  for (let at = 0; at < bytes.length; at += CHUNK_BYTES)
    pieces.push(bytes.subarray(at, at + CHUNK_BYTES));
  if (pieces.length === 0 && end) pieces.push(Buffer.alloc(0));
  for (const [i, body] of pieces.entries()) {
    const streamed_response = { body, end_of_stream: end && i === pieces.length - 1 };
    yield { [direction]: { response: { body_mutation: { streamed_response } } } };
  }
}

const GENERATION: ReadonlySet<string> = new Set<string>(ENDPOINTS);
const DECODE: ReadonlySet<string> = new Set(DECODE_ROUTES);

/**
 * Whether a path is one of those that generate text, for which instances are chosen by their body.
 */
export function isGeneration(path: string): path is Endpoint {
  return GENERATION.has(path);
}

/**
 * Overload is 429, also where it is of all clients together: a gateway takes 503 for a picker
 * without instances.
 */
export function refusalStatus(error: KvError): number {
  return error.code === "KV_PROXY_OVERLOADED" ? 429 : statusOf(error);
}

/** The gateway is configured in a way that the picker cannot serve. */
class WrongUse extends Error {}

/**
 * @throws `WrongUse` for a gateway that would not send the whole body, or would not take it back.
 */
export function requireFullDuplex(message: ProcessingRequest): void {
  const {
    request_headers: headers,
    protocol_config: config,
    observability_mode: observes,
  } = message;
  if (observes === true)
    throw new WrongUse("observability_mode is set: the picker cannot answer then");
  const { request_body_mode: request = 0, response_body_mode: response = 0 } = config ?? {};
  // Of a request without a body nothing else is needed.
  const isRequestRight =
    config === undefined || request === FULL_DUPLEX_STREAMED || headers?.end_of_stream === true;
  if (isRequestRight && (response === 0 || response === FULL_DUPLEX_STREAMED)) return;
  const wrong = isRequestRight ? "response" : "request";
  const mode = bodyModeName(isRequestRight ? response : request);
  throw new WrongUse(
    `${wrong}_body_mode is ${mode}; set processing_mode.${wrong}_body_mode to FULL_DUPLEX_STREAMED`,
  );
}

/** The error with which a stream ends that the picker cannot serve. */
export function grpcError(thrown: unknown): object {
  const isWrongUse = thrown instanceof WrongUse;
  return {
    code: isWrongUse ? GrpcStatus.FAILED_PRECONDITION : GrpcStatus.INTERNAL,
    details: isWrongUse
      ? thrown.message
      : KvError.from(thrown, "KV_INTERNAL", "the picker failed").message,
  };
}

/**
 * Only these reach instances: what has a prefill and a decode leg, and what any decode instance
 * answers alone.
 * @throws `KV_REQUEST_INVALID` (404, 405), with the reason for a route that vLLM has.
 */
export function requireServed(method: string, path: string): void {
  const isModels = path === "/v1/models" || path.startsWith("/v1/models/");
  const isPost = isGeneration(path) || DECODE.has(path);
  if (isPost ? method === "POST" : isModels && (method === "GET" || method === "HEAD")) return;
  const known = isPost || isModels;
  const why = whyRefused(method, path);
  const message = known
    ? `${method} is not served at this path`
    : `this path is not served${why === undefined ? "" : `: ${why}`}`;
  throw new KvError("KV_REQUEST_INVALID", message, {
    hint: known
      ? undefined
      : `served are ${ENDPOINTS.join(", ")}, /v1/models, and what a decode instance answers alone, such as /tokenize`,
    details: { httpStatus: known ? 405 : 404 },
  });
}

/** The path as a label of metrics. */
export function endpointLabel(path: string): string {
  if (isGeneration(path)) return path;
  return path.startsWith("/v1/models") ? "/v1/models" : "other";
}

/** 408: the body did not arrive in time. */
export function tooSlow(receiveMs: number): KvError {
  return new KvError("KV_REQUEST_TIMEOUT", `the body did not arrive within ${receiveMs} ms`, {
    details: { httpStatus: 408, limit: "timeouts.receiveMs" },
  });
}

/**
 * A gateway has neither ended nor closed its stream: without a limit, its request would count as
 * load of its instances for ever.
 */
export function neverEnded(requestMs: number): KvError {
  return new KvError(
    "KV_REQUEST_TIMEOUT",
    `the gateway has not ended the stream within ${requestMs} ms`,
    {
      hint: "timeouts.requestMs sets the limit",
      details: { limit: "timeouts.requestMs" },
    },
  );
}

/** How far the request, or its answer, has come. */
interface Progress {
  hasBegun: boolean;
  hasEnded: boolean;
}

/**
 * The order of a stream's messages: headers, body, trailers, of the request and then of the answer.
 * A gateway may leave parts out by its configuration, and an Envoy sends a second, empty end of a
 * body (envoy#46237). Its own answer may come before the request has ended.
 */
export class MessageOrder {
  readonly #request: Progress = { hasBegun: false, hasEnded: false };
  readonly #answer: Progress = { hasBegun: false, hasEnded: false };

  /**
   * Whether a message is to be read; false for one that says nothing.
   * @throws `WrongUse` for one that cannot follow those before it.
   */
  takes(message: ProcessingRequest): boolean {
    const isAnswer =
      message.response_headers !== undefined ||
      message.response_body !== undefined ||
      message.response_trailers !== undefined;
    const progress = isAnswer ? this.#answer : this.#request;
    const of = isAnswer ? "response" : "request";
    const headers = message.request_headers ?? message.response_headers;
    const body = message.request_body ?? message.response_body;
    const trailers = message.request_trailers ?? message.response_trailers;
    if (headers === undefined && body === undefined && trailers === undefined) return false;
    const part = headers !== undefined ? "headers" : body !== undefined ? "body" : "trailers";
    if (!this.#request.hasBegun && (isAnswer || headers === undefined))
      throw first(`${of}_${part}`, "request");
    if (headers !== undefined) {
      if (progress.hasBegun) throw new WrongUse(`${of}_headers came twice in one stream`);
      progress.hasBegun = true;
      progress.hasEnded = headers.end_of_stream === true;
      return true;
    }
    if (!progress.hasBegun) throw first(`${of}_${part}`, of);
    // Nobody reads the rest of a request that has its answer.
    if (!isAnswer && this.#answer.hasBegun) return false;
    if (progress.hasEnded) {
      if (body !== undefined && (body.body?.length ?? 0) === 0) return false;
      throw new WrongUse(`${of}_${part} came after the end of the ${of}`);
    }
    progress.hasEnded = trailers !== undefined || body?.end_of_stream === true;
    return true;
  }
}

function first(part: string, of: string): WrongUse {
  return new WrongUse(
    `${part} came before ${of}_headers; set processing_mode.${of}_header_mode to SEND`,
  );
}
