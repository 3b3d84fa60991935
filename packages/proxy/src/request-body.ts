import { KvError } from "@kv/interface";
import type { Endpoint } from "./endpoint.js";
import { refuseWhatPrefillHides } from "./hidden-by-prefill.js";
import { whyUnsplittable } from "./unsplittable.js";

/** A request to generate, read just far enough to know how it crosses the boundary between prefill and decode. */
export interface GenerationRequest {
  readonly endpoint: Endpoint;
  /** The body as the client wrote it. */
  readonly text: string;
  readonly fields: Readonly<Record<string, unknown>>;
  /** Why prefill and decode of it cannot be parted without a wrong answer; undefined where they can. */
  readonly unsplittable: string | undefined;
}

const utf8 = new TextDecoder("utf-8", { fatal: true });

/** Errors: `KV_REQUEST_INVALID`. What an engine would refuse anyway, and refuses well, is left to it. */
export function readRequest(endpoint: Endpoint, body: Uint8Array): GenerationRequest {
  let text: string;
  let fields: unknown;
  try {
    text = utf8.decode(body);
    fields = JSON.parse(text);
  } catch (cause) {
    throw new KvError("KV_REQUEST_INVALID", `the body is not JSON: ${(cause as Error).message}`, { cause });
  }
  if (typeof fields !== "object" || fields === null || Array.isArray(fields)) {
    throw new KvError("KV_REQUEST_INVALID", "the body must be a JSON object");
  }
  const request = fields as Record<string, unknown>;
  refuseForeignParams(request);
  refuseWhatPrefillHides(request);
  return { endpoint, text, fields: request, unsplittable: whyUnsplittable(endpoint, request) };
}

/** A client that could name blocks and hosts would read other requests' memory through the decode worker. */
function refuseForeignParams(fields: Record<string, unknown>): void {
  if (fields.kv_transfer_params == null) return;
  throw new KvError(
    "KV_REQUEST_INVALID",
    "kv_transfer_params is set by the proxy and not taken from a client",
    {
      hint: "leave kv_transfer_params out of the body",
      details: { param: "kv_transfer_params" },
    },
  );
}
