import { KvError } from "@kv/interface";
import { fieldsOf, malformed } from "./fields.js";
import { decodeMsgpack, encodeMsgpack, Float64, type MsgpackLimits } from "./msgpack.js";

// vLLM 0.32 and 0.33: REQ sends one frame, [b"get_meta_msg", pp_rank, tp_rank]; ROUTER answers two: the payload, and its clock in seconds.

const MARKER = new TextEncoder().encode("get_meta_msg");
const REQUEST_LIMITS: MsgpackLimits = { maxBytes: 1024, maxDepth: 2, maxItems: 8 };

/** The key under which our own peers put what only they understand. vLLM ignores keys it does not know. */
const EXTENSION_KEY = "kv_extension";

export interface HandshakeRequest {
  readonly ppRank: number;
  readonly tpRank: number;
}

/** What one `@kv` engine tells another beyond vLLM's protocol. Plain data; unknown keys are kept. */
export type HandshakeExtension = Readonly<Record<string, unknown>>;

export interface HandshakePayload {
  /** Lower-case hex of a SHA-256; only the side that asks compares it. */
  readonly compatibilityHash: string;
  /** An encoded `AgentMetadata`, kept as bytes: it is decoded only when the hash fits. */
  readonly agentMetadataBytes: Uint8Array;
  readonly extension?: HandshakeExtension;
  readonly rest: Readonly<Record<string, unknown>>;
}

export interface HandshakeReply {
  readonly payload: HandshakePayload;
  /** The listener's `time.perf_counter()` when it answered, in seconds; undefined from peers before connector version 5. */
  readonly clockSeconds: number | undefined;
}

export function encodeHandshakeRequest(request: HandshakeRequest): Uint8Array {
  return encodeMsgpack([MARKER, request.ppRank, request.tpRank]);
}

/** Errors: `KV_WIRE_MALFORMED`, `KV_WIRE_LIMIT_EXCEEDED`. */
export function decodeHandshakeRequest(frames: readonly Uint8Array[]): HandshakeRequest {
  const what = "handshake request";
  const [frame] = frames;
  if (frame === undefined || frames.length !== 1) throw malformed(what, "frames", "one frame", frames.length);
  const value = decodeMsgpack(frame, what, REQUEST_LIMITS);
  if (!Array.isArray(value) || value.length !== 3)
    throw malformed(what, "the message", "a list of three", value);
  const [marker, ppRank, tpRank] = value as unknown[];
  if (!(marker instanceof Uint8Array) || !sameBytes(marker, MARKER)) {
    throw malformed(what, "the marker", 'the bytes "get_meta_msg"', marker);
  }
  return { ppRank: rank(ppRank, "pp_rank", what), tpRank: rank(tpRank, "tp_rank", what) };
}

export function encodeHandshakePayload(payload: HandshakePayload): Uint8Array {
  return encodeMsgpack({
    compatibility_hash: payload.compatibilityHash,
    agent_metadata_bytes: payload.agentMetadataBytes,
    ...(payload.extension === undefined ? {} : { [EXTENSION_KEY]: payload.extension }),
    ...payload.rest,
  });
}

export function decodeHandshakePayload(bytes: Uint8Array): HandshakePayload {
  const what = "handshake reply";
  const fields = fieldsOf(decodeMsgpack(bytes, what), what, 1000);
  const extension = fields.raw(EXTENSION_KEY);
  if (extension !== undefined && !isMap(extension)) throw malformed(what, EXTENSION_KEY, "a map", extension);
  return {
    compatibilityHash: fields.text("compatibility_hash"),
    agentMetadataBytes: fields.bytes("agent_metadata_bytes"),
    ...(extension === undefined ? {} : { extension }),
    rest: fields.rest(),
  };
}

/** The two frames of a reply. `clockSeconds` is taken as late as possible: the asker measures the offset by it. */
export function encodeHandshakeReply(
  payloadBytes: Uint8Array,
  clockSeconds: number,
): readonly [Uint8Array, Uint8Array] {
  return [payloadBytes, encodeMsgpack(new Float64(clockSeconds))];
}

export function decodeHandshakeReply(frames: readonly Uint8Array[]): HandshakeReply {
  const [first, second] = frames;
  if (first === undefined || frames.length > 2) {
    throw new KvError("KV_WIRE_MALFORMED", `handshake reply: ${frames.length} frames, not one or two`);
  }
  return {
    payload: decodeHandshakePayload(first),
    clockSeconds: second === undefined ? undefined : clock(second),
  };
}

function clock(frame: Uint8Array): number {
  const value = decodeMsgpack(frame, "handshake clock", REQUEST_LIMITS);
  if (typeof value !== "number" || !Number.isFinite(value))
    throw malformed("handshake clock", "the frame", "a number", value);
  return value;
}

function rank(value: unknown, name: string, what: string): number {
  if (typeof value !== "number" || !Number.isSafeInteger(value) || value < 0 || value > 65_535) {
    throw malformed(what, name, "a rank", value);
  }
  return value;
}

function isMap(value: unknown): value is HandshakeExtension {
  return (
    typeof value === "object" && value !== null && !Array.isArray(value) && !(value instanceof Uint8Array)
  );
}

function sameBytes(a: Uint8Array, b: Uint8Array): boolean {
  return a.byteLength === b.byteLength && a.every((byte, i) => byte === b[i]);
}
