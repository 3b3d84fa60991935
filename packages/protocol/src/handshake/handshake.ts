import { KvError } from "@kv/interface";
import {
  decodeMsgpack,
  encodeMsgpack,
  Float64,
  isMap,
  MapFields,
  type MsgpackLimits,
  malformed,
} from "../encoding/messages.js";

// vLLM 0.32 and 0.33: REQ sends one frame, [b"get_meta_msg", pp_rank, tp_rank]; ROUTER answers with
// the payload and its clock in seconds.

const MARKER = new TextEncoder().encode("get_meta_msg");
const REQUEST_LIMITS: MsgpackLimits = { maxBytes: 1024, maxDepth: 2, maxItems: 8 };
const REFUSAL_LIMITS: MsgpackLimits = { maxBytes: 4096, maxDepth: 1, maxItems: 4 };

/** vLLM ignores unknown keys of the payload. */
const EXTENSION_KEY = "kv_extension";
const REFUSAL_KEY = "kv_refusal";

/** The rank whose metadata a peer asks for. */
export interface HandshakeRequest {
  readonly ppRank: number;
  readonly tpRank: number;
}

/** What `@kv` engines add to vLLM's handshake. Plain data; unknown keys are kept. */
export type HandshakeExtension = Readonly<Record<string, unknown>>;

/** The first frame of a handshake reply. */
export interface HandshakePayload {
  /** A `compatibilityHash`. The initiator compares it; the listener never does. */
  readonly compatibilityHash: string;
  /** An `AgentMetadata`, encoded until the hash was compared. */
  readonly agentMetadataBytes: Uint8Array;
  /** Absent from vLLM. */
  readonly extension?: HandshakeExtension | undefined;
  readonly rest: Readonly<Record<string, unknown>>;
}

/** Both frames of a handshake reply. */
export interface HandshakeReply {
  readonly payload: HandshakePayload;
  /** The listener's `time.perf_counter()`; undefined before connector version 5. */
  readonly clockSeconds: number | undefined;
}

/** Encodes the request's one frame. */
export function encodeHandshakeRequest(request: HandshakeRequest): Uint8Array {
  return encodeMsgpack([MARKER, request.ppRank, request.tpRank]);
}

/**
 * Decodes a request's frames.
 *
 * @throws `KV_WIRE_MALFORMED`, `KV_WIRE_LIMIT_EXCEEDED`.
 */
export function decodeHandshakeRequest(frames: readonly Uint8Array[]): HandshakeRequest {
  const what = "handshake request";
  const [frame] = frames;
  if (frame === undefined || frames.length !== 1)
    throw malformed(what, "frames", "one frame", frames.length);
  const value = decodeMsgpack(frame, what, REQUEST_LIMITS);
  if (!Array.isArray(value) || value.length !== 3)
    throw malformed(what, "the message", "a list of three", value);
  const [marker, ppRank, tpRank] = value as unknown[];
  if (!(marker instanceof Uint8Array) || !sameBytes(marker, MARKER)) {
    throw malformed(what, "the marker", 'the bytes "get_meta_msg"', marker);
  }
  return { ppRank: rank(ppRank, "pp_rank", what), tpRank: rank(tpRank, "tp_rank", what) };
}

/**
 * Encodes the reply's first frame.
 *
 * @throws `KV_INTERNAL` as `encodeMsgpack`.
 */
export function encodeHandshakePayload(payload: HandshakePayload): Uint8Array {
  return encodeMsgpack({
    compatibility_hash: payload.compatibilityHash,
    agent_metadata_bytes: payload.agentMetadataBytes,
    ...(payload.extension === undefined ? {} : { [EXTENSION_KEY]: payload.extension }),
    ...payload.rest,
  });
}

/**
 * Decodes the reply's first frame.
 *
 * @throws `KV_WIRE_MALFORMED` naming the field, `KV_WIRE_LIMIT_EXCEEDED`.
 */
export function decodeHandshakePayload(bytes: Uint8Array): HandshakePayload {
  const what = "handshake reply";
  const fields = new MapFields(decodeMsgpack(bytes, what), { what, maxItems: 1000 });
  const extension = fields.raw(EXTENSION_KEY);
  if (extension !== undefined && !isMap(extension)) {
    throw fields.malformed(EXTENSION_KEY, "a map", extension);
  }
  return {
    compatibilityHash: fields.string("compatibility_hash"),
    agentMetadataBytes: fields.bytes("agent_metadata_bytes"),
    extension,
    rest: fields.rest(),
  };
}

/**
 * Returns both frames of a reply. Read the clock late: the initiator estimates the offset from it.
 */
export function encodeHandshakeReply(
  payloadBytes: Uint8Array,
  clockSeconds: number,
): readonly [Uint8Array, Uint8Array] {
  return [payloadBytes, encodeMsgpack(new Float64(clockSeconds))];
}

/**
 * Decodes both frames of a reply.
 *
 * @throws `KV_WIRE_MALFORMED`, `KV_WIRE_LIMIT_EXCEEDED`.
 */
export function decodeHandshakeReply(frames: readonly Uint8Array[]): HandshakeReply {
  const [first, second] = frames;
  if (first === undefined || frames.length > 2) {
    throw new KvError(
      "KV_WIRE_MALFORMED",
      `handshake reply: ${frames.length} frames, not one or two`,
    );
  }
  return {
    payload: decodeHandshakePayload(first),
    clockSeconds: second === undefined ? undefined : decodeClock(second),
  };
}

/**
 * Encodes a refusal in one frame, which vLLM's client takes for a failed handshake at once; without
 * a reply it waits for its timeout. The reason is cut to 1,000 characters.
 */
export function encodeHandshakeRefusal(reason: string): Uint8Array {
  return encodeMsgpack({ [REFUSAL_KEY]: reason.slice(0, 1000) });
}

/** Returns the reason when the frames are a refusal. */
export function decodeHandshakeRefusal(frames: readonly Uint8Array[]): string | undefined {
  const [frame] = frames;
  if (frames.length !== 1 || frame === undefined || frame.byteLength > REFUSAL_LIMITS.maxBytes)
    return undefined;
  try {
    const value = decodeMsgpack(frame, "handshake refusal", REFUSAL_LIMITS);
    const reason = isMap(value) ? value[REFUSAL_KEY] : undefined;
    return typeof reason === "string" ? reason : undefined;
  } catch {
    return undefined;
  }
}

function decodeClock(frame: Uint8Array): number {
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

function sameBytes(a: Uint8Array, b: Uint8Array): boolean {
  return a.byteLength === b.byteLength && a.every((byte, i) => byte === b[i]);
}
