import { decodeMsgpack, encodeMsgpack, type MsgpackLimits } from "./wire/msgpack.js";

/**
 * One frame instead of a reply's two: "no, because". vLLM's client takes a reply of one frame for a failed handshake at once; no reply
 * would cost it its timeout, and an exception in the listener, which is what vLLM's own does, every handshake after it.
 */
const KEY = "kv_refusal";
const LIMITS: MsgpackLimits = { maxBytes: 4096, maxDepth: 1, maxItems: 4 };

export function encodeHandshakeRefusal(reason: string): Uint8Array {
  return encodeMsgpack({ [KEY]: reason.slice(0, 1000) });
}

/** The reason, if these frames are a refusal. */
export function decodeHandshakeRefusal(frames: readonly Uint8Array[]): string | undefined {
  const [frame] = frames;
  if (frames.length !== 1 || frame === undefined || frame.byteLength > LIMITS.maxBytes) return undefined;
  try {
    const value = decodeMsgpack(frame, "handshake refusal", LIMITS) as Record<string, unknown> | null;
    const reason = typeof value === "object" && value !== null ? value[KEY] : undefined;
    return typeof reason === "string" ? reason : undefined;
  } catch {
    return undefined;
  }
}
