import { MapFields } from "../encoding/map-fields.js";
import { isCapability } from "../transfer-params/capability.js";
import {
  decodeNotification,
  type ExtensionMessage,
  encodeNotification,
  MAX_REQUEST_ID_BYTES,
} from "./notifications.js";

/**
 * Feature name of the messages below, listed in the handshake. With it, D sends "done" and
 * heartbeats together with the request's capability instead of in vLLM's forms, which anybody who
 * knows the request id can write.
 */
export const REQUEST_CONTROL = "request-control-1";

const DONE = "done";
const HEARTBEAT = "heartbeat";
const MAX_READERS = 999_999;
const MAX_HEARTBEAT_IDS = 100_000;

/** A request at P and the proof that the sender holds its `kv_transfer_params`. */
export interface RequestProof {
  readonly requestId: string;
  readonly capability: string;
}

/** A message of this extension. */
export type RequestControlMessage =
  /** A reader has the blocks, or will not read them; as `done` of `KvNotification`. */
  | (RequestProof & {
      readonly kind: "done";
      /** How many of these messages P's rank waits for. */
      readonly readers: number;
    })
  /** D extends the leases of these requests. */
  | {
      readonly kind: "heartbeat";
      readonly requests: readonly RequestProof[];
    };

/** Encodes a message of this extension. Only for peers with the feature `REQUEST_CONTROL`. */
export function encodeRequestControl(message: RequestControlMessage): Uint8Array {
  return encodeNotification({ kind: "extension", message: mapOf(message) });
}

/**
 * Undefined for a `type` of another extension.
 *
 * @throws `KV_WIRE_MALFORMED` naming the field, `KV_WIRE_LIMIT_EXCEEDED`.
 */
export function decodeRequestControl(message: ExtensionMessage): RequestControlMessage | undefined {
  const { type, ...rest } = message;
  if (type !== DONE && type !== HEARTBEAT) return undefined;
  const fields = new MapFields(rest, { what: "request message", maxItems: MAX_HEARTBEAT_IDS });
  if (type === DONE) {
    return {
      kind: "done",
      requestId: fields.string("request_id", { minLength: 1, maxLength: MAX_REQUEST_ID_BYTES }),
      readers: fields.integer("readers", { min: 1, max: MAX_READERS }),
      capability: capability(fields, "capability", fields.raw("capability")),
    };
  }
  const ids = fields.strings("request_ids") ?? [];
  const capabilities = fields.strings("capabilities") ?? [];
  if (ids.length !== capabilities.length)
    throw fields.malformed(
      "capabilities",
      `a list of ${ids.length}, one per request id`,
      capabilities,
    );
  return {
    kind: "heartbeat",
    requests: ids.map((requestId, i) => ({
      requestId,
      capability: capability(fields, `capabilities[${i}]`, capabilities[i]),
    })),
  };
}

/**
 * The request of a "done" notification, in vLLM's form or in that of this extension, by its
 * receiver's id. Undefined for any other notification, and for one without a known form.
 */
export function decodeDone(
  payload: Uint8Array,
): { readonly requestId: string; readonly readers: number } | undefined {
  try {
    const notification = decodeNotification(payload);
    const message =
      notification.kind === "extension" ? decodeRequestControl(notification.message) : notification;
    return message?.kind === "done" ? message : undefined;
  } catch {
    return undefined;
  }
}

function mapOf(message: RequestControlMessage): ExtensionMessage {
  if (message.kind === "heartbeat") {
    return {
      type: HEARTBEAT,
      request_ids: message.requests.map(({ requestId }) => requestId),
      capabilities: message.requests.map((request) => request.capability),
    };
  }
  const { requestId, readers, capability: proof } = message;
  return { type: DONE, request_id: requestId, readers, capability: proof };
}

function capability(fields: MapFields, name: string, value: unknown): string {
  if (isCapability(value)) return value;
  throw fields.malformed(name, "a capability of 22 characters", value);
}
