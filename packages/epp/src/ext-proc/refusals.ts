import { status as GrpcStatus } from "@grpc/grpc-js";
import type { Endpoint } from "@kv/fleet/front-end";
import { statusOf } from "@kv/http";
import { KvError } from "@kv/interface";
import { bodyModeName, FULL_DUPLEX_STREAMED, type ProcessingRequest } from "./messages.js";

const GENERATION: ReadonlySet<string> = new Set<Endpoint>([
  "/v1/completions",
  "/v1/chat/completions",
  "/v1/responses",
  "/v1/messages",
]);

/** Whether a path is one of those that generate text, for which instances are chosen by their body. */
export function isGeneration(path: string): path is Endpoint {
  return GENERATION.has(path);
}

/** Overload is 429, also where it is of all clients together: a gateway takes 503 for a picker without instances. */
export function refusalStatus(error: KvError): number {
  return error.code === "KV_PROXY_OVERLOADED" ? 429 : statusOf(error);
}

/** The gateway is configured in a way that the picker cannot serve. */
class WrongUse extends Error {}

/** Errors: `WrongUse` for a gateway that would not send the whole body, or would not take it back. */
export function requireFullDuplex(message: ProcessingRequest): void {
  const { request_headers: headers, protocol_config: config, observability_mode: observes } = message;
  if (observes === true) throw new WrongUse("observability_mode is set: the picker cannot answer then");
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
    details: isWrongUse ? thrown.message : KvError.from(thrown, "KV_INTERNAL", "the picker failed").message,
  };
}

/** Only these reach instances: vLLM has further routes, of which some take `kv_transfer_params`. Errors: `KV_REQUEST_INVALID` (404, 405). */
export function requireServed(method: string, path: string): void {
  const isModels = path === "/v1/models" || path.startsWith("/v1/models/");
  if (isGeneration(path) ? method === "POST" : isModels && (method === "GET" || method === "HEAD")) return;
  const known = isGeneration(path) || isModels;
  const message = known ? `${method} is not served at this path` : "this path is not served";
  throw new KvError("KV_REQUEST_INVALID", message, {
    hint: known ? undefined : `served are ${[...GENERATION].join(", ")} and /v1/models`,
    details: { httpStatus: known ? 405 : 404 },
  });
}

/** The path as a label of metrics. */
export function endpointLabel(path: string): string {
  if (isGeneration(path)) return path;
  return path.startsWith("/v1/models") ? "/v1/models" : "other";
}

/** 413: the body is larger than the limit. */
export function tooLarge(limitBytes: number): KvError {
  return new KvError("KV_REQUEST_INVALID", `the body is larger than ${limitBytes} bytes`, {
    hint: "the limit is set by limits.bodyLengthBytes, or --body-limit-bytes",
    details: { httpStatus: 413, limit: "limits.bodyLengthBytes" },
  });
}

/** 408: the body did not arrive in time. */
export function tooSlow(receiveMs: number): KvError {
  return new KvError("KV_REQUEST_TIMEOUT", `the body did not arrive within ${receiveMs} ms`, {
    details: { httpStatus: 408, limit: "timeouts.receiveMs" },
  });
}
