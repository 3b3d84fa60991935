import { createHmac, timingSafeEqual } from "node:crypto";
import { isMap } from "../encoding/map-fields.js";
import { decodeMsgpack, encodeMsgpack, MSGPACK_LIMITS, type MsgpackLimits } from "../encoding/msgpack.js";

// Between `@kv` peers whose side channel requires the handshake key. A peer that sends anything else gets a challenge: one frame, which vLLM's
// client treats as a failed handshake. It repeats its message with a proof: an HMAC over the challenge, a nonce of its own and the message.
// The reply is signed too, over the same nonce.

/** A message on the side channel with the proof that its sender has the key. */
export interface SignedRequest {
  /** The message's frames. */
  readonly frames: readonly Uint8Array[];
  /** The receiver's challenge. */
  readonly challenge: Uint8Array;
  /** Chosen by the sender, never twice; 16 bytes. */
  readonly nonce: Uint8Array;
  /** HMAC-SHA-256 of the other fields. */
  readonly hmac: Uint8Array;
}

/** Length of a challenge and of an HMAC. */
const DIGEST_BYTES = 32;
const NONCE_BYTES = 16;
const REQUEST_LIMITS: MsgpackLimits = { maxBytes: 16_384, maxDepth: 2, maxItems: 8 };
const CHALLENGE_LIMITS: MsgpackLimits = { maxBytes: 4096, maxDepth: 1, maxItems: 4 };

/** Encodes a challenge. `reason` is what a peer without the key reads. Throws nothing. */
export function encodeChallenge(challenge: Uint8Array, reason: string): Uint8Array {
  return encodeMsgpack({ kv_refusal: reason, kv_challenge: challenge });
}

/** The challenge, when the frames are one; undefined otherwise. Throws nothing. */
export function decodeChallenge(frames: readonly Uint8Array[]): Uint8Array | undefined {
  const challenge = mapOf(frames, CHALLENGE_LIMITS)?.kv_challenge;
  return isBytes(challenge, DIGEST_BYTES) ? challenge : undefined;
}

/** Encodes a message with the proof of the key. Throws nothing. */
export function encodeSignedRequest(message: Omit<SignedRequest, "hmac">, key: Uint8Array): Uint8Array {
  const { frames, challenge, nonce } = message;
  return encodeMsgpack({ kv: "signed", frames, challenge, nonce, hmac: requestDigest(message, key) });
}

/** Undefined for anything but a well-formed signed message. The proof is not checked. Throws nothing. */
export function decodeSignedRequest(frames: readonly Uint8Array[]): SignedRequest | undefined {
  const map = mapOf(frames, REQUEST_LIMITS);
  if (map?.kv !== "signed") return undefined;
  const { frames: inner, challenge, nonce, hmac } = map;
  if (!isFrames(inner) || !isBytes(challenge, DIGEST_BYTES)) return undefined;
  if (!isBytes(nonce, NONCE_BYTES) || !isBytes(hmac, DIGEST_BYTES)) return undefined;
  return { frames: inner, challenge, nonce, hmac };
}

/** Whether the message was signed with the key. Throws nothing. */
export function isSignedWith(request: SignedRequest, key: Uint8Array): boolean {
  return timingSafeEqual(requestDigest(request, key), request.hmac);
}

/** Encodes the reply to a signed message, signed over its nonce. Throws nothing. */
export function encodeSignedReply(
  frames: readonly Uint8Array[],
  nonce: Uint8Array,
  key: Uint8Array,
): Uint8Array {
  return encodeMsgpack({ kv: "signed_reply", frames, hmac: replyDigest(frames, nonce, key) });
}

/** The frames of a reply that was signed over the nonce with one of the keys; undefined for any other. Throws nothing. */
export function decodeSignedReply(
  frames: readonly Uint8Array[],
  nonce: Uint8Array,
  keys: readonly Uint8Array[],
): readonly Uint8Array[] | undefined {
  const map = mapOf(frames, MSGPACK_LIMITS);
  if (map?.kv !== "signed_reply" || !isFrames(map.frames) || !isBytes(map.hmac, DIGEST_BYTES))
    return undefined;
  const { frames: inner, hmac } = map;
  return keys.some((key) => timingSafeEqual(replyDigest(inner, nonce, key), hmac)) ? inner : undefined;
}

function requestDigest({ challenge, nonce, frames }: Omit<SignedRequest, "hmac">, key: Uint8Array): Buffer {
  return createHmac("sha256", key)
    .update(encodeMsgpack(["kv-signed-1", challenge, nonce, frames]))
    .digest();
}

function replyDigest(frames: readonly Uint8Array[], nonce: Uint8Array, key: Uint8Array): Buffer {
  return createHmac("sha256", key)
    .update(encodeMsgpack(["kv-signed-reply-1", nonce, frames]))
    .digest();
}

function mapOf(
  frames: readonly Uint8Array[],
  limits: MsgpackLimits,
): Readonly<Record<string, unknown>> | undefined {
  const [frame] = frames;
  if (frames.length !== 1 || frame === undefined || frame.byteLength > limits.maxBytes) return undefined;
  try {
    const value = decodeMsgpack(frame, "signed message", limits);
    return isMap(value) ? value : undefined;
  } catch {
    return undefined;
  }
}

function isFrames(value: unknown): value is readonly Uint8Array[] {
  return Array.isArray(value) && value.length <= 2 && value.every((frame) => frame instanceof Uint8Array);
}

function isBytes(value: unknown, length: number): value is Uint8Array {
  return value instanceof Uint8Array && value.byteLength === length;
}
