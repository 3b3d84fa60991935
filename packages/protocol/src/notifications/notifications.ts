import { KvError } from "@kv/interface";
import {
  atOnce,
  decodeMsgpackInSteps,
  encodeMsgpack,
  isMap,
  MapFields,
  type MsgpackLimits,
} from "../encoding/messages.js";
import { isCapability, MAX_REQUEST_ID_BYTES } from "../transfer-params/transfer-params.js";

const MAX_NOTIFICATION_BYTES = 4 * 2 ** 20;
const MAX_HEARTBEAT_IDS = 100_000;
const MAP_LIMITS: MsgpackLimits = {
  maxBytes: MAX_NOTIFICATION_BYTES,
  maxDepth: 6,
  maxItems: 1_000_000,
};

const HEARTBEAT = "HB:";
const PUSH_REGISTRATION = "PUSH_REG:";
const PUSH_FAILURE = "PUSH_FAIL:";
/**
 * Begins notifications between `@kv` peers; a msgpack map with a `type` follows. Only for peers
 * whose handshake lists the message under `features`: vLLM splits unknown notifications at the
 * colons and throws in its engine step.
 */
const EXTENSION = "KV1:";

/** A message between `@kv` peers. A receiver ignores an unknown `type`. */
export type ExtensionMessage = Readonly<{ type: string } & Record<string, unknown>>;

/** A notification as it arrives at an agent. */
export type KvNotification =
  /** Pull: a reader has the blocks. Push: P has written (vLLM, both: `"{request_id}:{n}"`). */
  | {
      readonly kind: "done";
      /** The receiver's id of the request. */
      readonly requestId: string;
      /** How many of these the receiver waits for. */
      readonly readers: number;
    }
  /** D extends these leases (vLLM: `"HB:id1,id2"`). */
  | {
      readonly kind: "heartbeat";
      readonly requestIds: readonly string[];
    }
  /** Push: D registers blocks at P (vLLM: `PUSH_REG:` and a map for `decodePushRegistration`). */
  | {
      readonly kind: "push-registration";
      readonly registration: Readonly<Record<string, unknown>>;
    }
  /**
   * Push: a rank of P will not write; it sends no `done` (vllm#50754, in no release:
   * `"PUSH_FAIL:{request_id}:{n}"`).
   */
  | {
      readonly kind: "push-failure";
      /** D's id of the request. */
      readonly requestId: string;
      readonly readers: number;
    }
  | {
      readonly kind: "extension";
      readonly message: ExtensionMessage;
    };

const toBytes = (text: string) => new TextEncoder().encode(text);
const strictUtf8 = new TextDecoder("utf-8", { fatal: true });

/**
 * Whether vLLM reads the id unchanged: it splits heartbeats at commas, and the protocol's prefixes
 * begin other notifications.
 */
export function isWireSafeRequestId(requestId: string): boolean {
  return (
    requestId !== "" &&
    !requestId.includes(",") &&
    ![HEARTBEAT, PUSH_REGISTRATION, PUSH_FAILURE, EXTENSION].some((prefix) =>
      requestId.startsWith(prefix),
    )
  );
}

/**
 * Encodes a notification. Ids must satisfy `isWireSafeRequestId`.
 *
 * @throws `KV_INTERNAL` as `encodeMsgpack`.
 */
export function encodeNotification(notification: KvNotification): Uint8Array {
  switch (notification.kind) {
    case "done":
      return toBytes(`${notification.requestId}:${notification.readers}`);
    case "heartbeat":
      return toBytes(HEARTBEAT + notification.requestIds.join(","));
    case "push-registration":
      return concat(PUSH_REGISTRATION, encodeMsgpack(notification.registration));
    case "push-failure":
      return toBytes(`${PUSH_FAILURE}${notification.requestId}:${notification.readers}`);
    case "extension":
      return concat(EXTENSION, encodeMsgpack(notification.message));
  }
}

export function encodeExtension(message: ExtensionMessage): Uint8Array {
  return encodeNotification({ kind: "extension", message });
}

/**
 * Decodes a peer's notification.
 *
 * @throws `KV_WIRE_MALFORMED` with the first bytes in hex for an unknown form;
 * `KV_WIRE_LIMIT_EXCEEDED` above 4 MiB or 100,000 ids.
 */
export function decodeNotification(payload: Uint8Array): KvNotification {
  return atOnce(decodeNotificationInSteps(payload));
}

/** As `decodeNotification`, in steps: the caller can serve others between them. */
export function* decodeNotificationInSteps(
  payload: Uint8Array,
): Generator<undefined, KvNotification> {
  if (payload.byteLength > MAX_NOTIFICATION_BYTES) {
    throw new KvError(
      "KV_WIRE_LIMIT_EXCEEDED",
      `notification: ${payload.byteLength} bytes; the limit is ${MAX_NOTIFICATION_BYTES}`,
    );
  }
  if (startsWith(payload, PUSH_REGISTRATION)) {
    const registration = yield* decodeMap(
      payload.subarray(PUSH_REGISTRATION.length),
      "push registration",
    );
    return { kind: "push-registration", registration };
  }
  if (startsWith(payload, EXTENSION)) {
    const message = yield* decodeMap(payload.subarray(EXTENSION.length), "notification");
    if (typeof message["type"] !== "string") throw unknownForm(payload);
    return { kind: "extension", message: message as ExtensionMessage };
  }
  let text: string;
  try {
    text = strictUtf8.decode(payload);
  } catch {
    throw unknownForm(payload);
  }
  if (text.startsWith(HEARTBEAT)) return heartbeat(text, payload);
  if (!text.startsWith(PUSH_FAILURE)) return { kind: "done", ...counted(text, payload) };
  return { kind: "push-failure", ...counted(text.slice(PUSH_FAILURE.length), payload) };
}

function heartbeat(text: string, payload: Uint8Array): KvNotification {
  const requestIds = text
    .slice(HEARTBEAT.length)
    .split(",")
    .filter((id) => id !== "");
  if (requestIds.length > MAX_HEARTBEAT_IDS) {
    throw new KvError(
      "KV_WIRE_LIMIT_EXCEEDED",
      `heartbeat: ${requestIds.length} request ids; the limit is ${MAX_HEARTBEAT_IDS}`,
    );
  }
  if (requestIds.some(isTooLong)) throw unknownForm(payload);
  return { kind: "heartbeat", requestIds };
}

function counted(text: string, payload: Uint8Array): { requestId: string; readers: number } {
  const colon = text.lastIndexOf(":");
  const requestId = text.slice(0, colon);
  const readers = text.slice(colon + 1);
  if (colon < 1 || !/^[1-9]\d{0,5}$/.test(readers) || isTooLong(requestId))
    throw unknownForm(payload);
  return { requestId, readers: Number(readers) };
}

function isTooLong(requestId: string): boolean {
  return toBytes(requestId).byteLength > MAX_REQUEST_ID_BYTES;
}

function* decodeMap(
  bytes: Uint8Array,
  what: string,
): Generator<undefined, Readonly<Record<string, unknown>>> {
  const value = yield* decodeMsgpackInSteps(bytes, what, MAP_LIMITS);
  if (isMap(value)) return value;
  throw new KvError("KV_WIRE_MALFORMED", `${what}: not a map`);
}

function unknownForm(payload: Uint8Array): KvError {
  const start = Buffer.from(payload.subarray(0, 40)).toString("hex");
  return new KvError(
    "KV_WIRE_MALFORMED",
    `notification of ${payload.byteLength} bytes has no known form: ${start}`,
  );
}

function startsWith(payload: Uint8Array, prefix: string): boolean {
  return toBytes(prefix).every((byte, at) => payload[at] === byte);
}

function concat(prefix: string, body: Uint8Array): Uint8Array {
  const bytes = new Uint8Array(prefix.length + body.byteLength);
  bytes.set(toBytes(prefix));
  bytes.set(body, prefix.length);
  return bytes;
}

/**
 * Feature of the messages below, listed in the handshake. "done" and heartbeats then carry the
 * request's capability; anybody who knows the request id can write vLLM's forms.
 */
export const REQUEST_CONTROL = "request-control-1";

const MAX_READERS = 999_999;

/** A request, and the proof that the sender holds its `kv_transfer_params`. */
export interface RequestProof {
  readonly requestId: string;
  readonly capability: string;
}

/** A message of the feature `REQUEST_CONTROL`. */
export type RequestControlMessage =
  /** A reader has the blocks, or will not read them. */
  | (RequestProof & {
      readonly kind: "done";
      /** How many of these P's rank waits for. */
      readonly readers: number;
    })
  /** D extends these leases. */
  | {
      readonly kind: "heartbeat";
      readonly requests: readonly RequestProof[];
    };

/** Encodes a message for peers with the feature `REQUEST_CONTROL`. */
export function encodeRequestControl(message: RequestControlMessage): Uint8Array {
  const { kind: type } = message;
  if (type === "done") {
    const { requestId, readers, capability } = message;
    return encodeExtension({ type, request_id: requestId, readers, capability });
  }
  const { requests } = message;
  return encodeExtension({
    type,
    request_ids: requests.map(({ requestId }) => requestId),
    capabilities: requests.map(({ capability }) => capability),
  });
}

/**
 * Decodes a message; undefined for a `type` of another extension.
 *
 * @throws `KV_WIRE_MALFORMED` naming the field, `KV_WIRE_LIMIT_EXCEEDED`.
 */
export function decodeRequestControl(message: ExtensionMessage): RequestControlMessage | undefined {
  const { type, ...rest } = message;
  if (type !== "done" && type !== "heartbeat") return undefined;
  const fields = new MapFields(rest, { what: "request message", maxItems: MAX_HEARTBEAT_IDS });
  if (type === "done") {
    return {
      kind: type,
      requestId: fields.string("request_id", { minLength: 1, maxLength: MAX_REQUEST_ID_BYTES }),
      readers: fields.integer("readers", { min: 1, max: MAX_READERS }),
      capability: capabilityOf(fields, "capability", fields.raw("capability")),
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
  const requests = ids.map((requestId, i) => ({
    requestId,
    capability: capabilityOf(fields, `capabilities[${i}]`, capabilities[i]),
  }));
  return { kind: type, requests };
}

/** Returns the request of a "done" notification in either form; undefined for anything else. */
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

function capabilityOf(fields: MapFields, name: string, value: unknown): string {
  if (isCapability(value)) return value;
  throw fields.malformed(name, "a capability of 22 characters", value);
}
