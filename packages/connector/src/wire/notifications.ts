import { KvError } from "@kv/interface";
import { decodeMsgpack, encodeMsgpack, type MsgpackLimits } from "./msgpack.js";

/** Longest request id that is taken, in bytes of UTF-8. */
export const MAX_REQUEST_ID_BYTES = 512;
const MAX_NOTIFICATION_BYTES = 4 * 2 ** 20;
const MAX_HEARTBEAT_IDS = 100_000;
const MAP_LIMITS: MsgpackLimits = { maxBytes: MAX_NOTIFICATION_BYTES, maxDepth: 6, maxItems: 1_000_000 };

const HEARTBEAT = "HB:";
const PUSH_REGISTRATION = "PUSH_REG:";
/**
 * Our own notifications: `KV1:`, then a msgpack map whose `type` says what it is and whose other keys are its data. Sent only to a peer
 * whose handshake named it among the `features` of its extension: vLLM splits what it does not know at the colons and throws in its
 * engine step. A receiver takes no offence at a `type` that it does not know.
 */
const OWN = "KV1:";

/** A message between our own peers: `type` names it, the rest is plain data. */
export type OwnNotification = Readonly<{ type: string } & Record<string, unknown>>;

/**
 * What may arrive on an agent. `done` (vLLM: `"{request_id}:{n}"`): a reader has the blocks, and n readers are to be waited for.
 * `heartbeat` (`"HB:id1,id2"`): the leases of these requests go on.
 */
export type KvNotification =
  | { readonly kind: "done"; readonly requestId: string; readonly readers: number }
  | { readonly kind: "heartbeat"; readonly requestIds: readonly string[] }
  /** The map as it came: `decodePushRegistration` reads it. */
  | { readonly kind: "push-registration"; readonly registration: Readonly<Record<string, unknown>> }
  | { readonly kind: "own"; readonly message: OwnNotification };

const toBytes = (text: string) => new TextEncoder().encode(text);
const strict = new TextDecoder("utf-8", { fatal: true });

export function encodeNotification(notification: KvNotification): Uint8Array {
  switch (notification.kind) {
    case "done":
      return toBytes(`${notification.requestId}:${notification.readers}`);
    case "heartbeat":
      return toBytes(HEARTBEAT + notification.requestIds.join(","));
    case "push-registration":
      return joined(PUSH_REGISTRATION, encodeMsgpack(notification.registration));
    case "own":
      return joined(OWN, encodeMsgpack(notification.message));
  }
}

/** Errors: `KV_WIRE_MALFORMED` with the first bytes in hex for what is none of them, `KV_WIRE_LIMIT_EXCEEDED`. */
export function decodeNotification(payload: Uint8Array): KvNotification {
  if (payload.byteLength > MAX_NOTIFICATION_BYTES) {
    throw new KvError(
      "KV_WIRE_LIMIT_EXCEEDED",
      `notification: ${payload.byteLength} bytes, at most ${MAX_NOTIFICATION_BYTES} are taken`,
    );
  }
  if (startsWith(payload, PUSH_REGISTRATION)) {
    return {
      kind: "push-registration",
      registration: map(payload.subarray(PUSH_REGISTRATION.length), "push registration"),
    };
  }
  if (startsWith(payload, OWN)) {
    const message = map(payload.subarray(OWN.length), "notification");
    if (typeof message["type"] !== "string") throw malformed(payload);
    return { kind: "own", message: message as OwnNotification };
  }
  let text: string;
  try {
    text = strict.decode(payload);
  } catch {
    throw malformed(payload);
  }
  if (text.startsWith(HEARTBEAT)) {
    const ids = text
      .slice(HEARTBEAT.length)
      .split(",")
      .filter((id) => id !== "");
    if (ids.length > MAX_HEARTBEAT_IDS) {
      throw new KvError(
        "KV_WIRE_LIMIT_EXCEEDED",
        `heartbeat: ${ids.length} request ids, at most ${MAX_HEARTBEAT_IDS} are taken`,
      );
    }
    if (ids.some((id) => toBytes(id).byteLength > MAX_REQUEST_ID_BYTES)) throw malformed(payload);
    return { kind: "heartbeat", requestIds: ids };
  }
  const colon = text.lastIndexOf(":");
  const requestId = text.slice(0, colon);
  const readers = text.slice(colon + 1);
  if (colon < 1 || !/^[1-9]\d{0,5}$/.test(readers) || toBytes(requestId).byteLength > MAX_REQUEST_ID_BYTES)
    throw malformed(payload);
  return { kind: "done", requestId, readers: Number(readers) };
}

function map(bytes: Uint8Array, what: string): Record<string, unknown> {
  const value = decodeMsgpack(bytes, what, MAP_LIMITS);
  if (typeof value !== "object" || value === null || Array.isArray(value) || value instanceof Uint8Array) {
    throw new KvError("KV_WIRE_MALFORMED", `${what}: not a map`);
  }
  return value as Record<string, unknown>;
}

function malformed(payload: Uint8Array): KvError {
  const shown = Array.from(payload.subarray(0, 40), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return new KvError(
    "KV_WIRE_MALFORMED",
    `notification of ${payload.byteLength} bytes is of no known form: ${shown}`,
  );
}

function startsWith(payload: Uint8Array, prefix: string): boolean {
  if (payload.byteLength < prefix.length) return false;
  for (let i = 0; i < prefix.length; i += 1) if (payload[i] !== prefix.charCodeAt(i)) return false;
  return true;
}

function joined(prefix: string, body: Uint8Array): Uint8Array {
  const bytes = new Uint8Array(prefix.length + body.byteLength);
  bytes.set(toBytes(prefix));
  bytes.set(body, prefix.length);
  return bytes;
}
