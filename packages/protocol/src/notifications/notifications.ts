import { KvError } from "@kv/interface";
import { isMap } from "../encoding/map-fields.js";
import {
  atOnce,
  decodeMsgpackInSteps,
  encodeMsgpack,
  type MsgpackLimits,
} from "../encoding/msgpack.js";

/** Longest request id that is accepted, in bytes of UTF-8. */
export const MAX_REQUEST_ID_BYTES = 512;

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
 * Prefix of notifications between `@kv` peers: a msgpack map follows, whose `type` names the
 * message. They go only to a peer whose handshake extension lists the message under `features`:
 * vLLM splits unknown notifications at the colons and throws in its engine step.
 */
const EXTENSION = "KV1:";

/**
 * A message between `@kv` peers: `type` names it, the other keys are plain data. A receiver ignores
 * a `type` that it does not know.
 */
export type ExtensionMessage = Readonly<{ type: string } & Record<string, unknown>>;

/** A notification as it arrives at an agent. */
export type KvNotification =
  /**
   * Pull: a reader has the blocks, and P waits for `readers` of them (vLLM: `"{request_id}:{n}"`).
   * Push: P has written (vLLM: the same form).
   */
  | {
      readonly kind: "done";
      /** The id that the receiver of the notification knows the request by. */
      readonly requestId: string;
      /** How many of these notifications the receiver waits for. */
      readonly readers: number;
    }
  /** D extends the leases of these requests (vLLM: `"HB:id1,id2"`). */
  | {
      readonly kind: "heartbeat";
      readonly requestIds: readonly string[];
    }
  /**
   * Push: D registers blocks at P (vLLM: `PUSH_REG:` and a msgpack map). `decodePushRegistration`
   * reads the map.
   */
  | {
      readonly kind: "push-registration";
      readonly registration: Readonly<Record<string, unknown>>;
    }
  /**
   * Push: a rank of P does not write to this one (vllm#50754, in no release:
   * `"PUSH_FAIL:{request_id}:{n}"`), in place of its `done`.
   */
  | {
      readonly kind: "push-failure";
      /** The id that D knows the request by. */
      readonly requestId: string;
      /** As in `done`. */
      readonly readers: number;
    }
  /** A message between `@kv` peers. */
  | {
      readonly kind: "extension";
      readonly message: ExtensionMessage;
    };

const toBytes = (text: string) => new TextEncoder().encode(text);
const strictUtf8 = new TextDecoder("utf-8", { fatal: true });

/**
 * Whether the id can be sent in `done` and `heartbeat` notifications so that a vLLM peer reads the
 * same id: heartbeats are split at commas, and an id that begins with one of the protocol's
 * prefixes would be read as another kind of notification.
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

/**
 * Decodes a peer's notification.
 *
 * @throws `KV_WIRE_MALFORMED` with the first bytes in hex when it has none of the known forms;
 * `KV_WIRE_LIMIT_EXCEEDED` above 4 MiB or 100,000 ids.
 */
export function decodeNotification(payload: Uint8Array): KvNotification {
  return atOnce(decodeNotificationInSteps(payload));
}

/**
 * As `decodeNotification`, but yields between the steps of a long map, so that the caller can serve
 * others meanwhile.
 */
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
  const start = Array.from(payload.subarray(0, 40), (byte) =>
    byte.toString(16).padStart(2, "0"),
  ).join("");
  return new KvError(
    "KV_WIRE_MALFORMED",
    `notification of ${payload.byteLength} bytes has no known form: ${start}`,
  );
}

function startsWith(payload: Uint8Array, prefix: string): boolean {
  if (payload.byteLength < prefix.length) return false;
  for (let i = 0; i < prefix.length; i += 1) if (payload[i] !== prefix.charCodeAt(i)) return false;
  return true;
}

function concat(prefix: string, body: Uint8Array): Uint8Array {
  const bytes = new Uint8Array(prefix.length + body.byteLength);
  bytes.set(toBytes(prefix));
  bytes.set(body, prefix.length);
  return bytes;
}
