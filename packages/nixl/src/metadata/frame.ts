import { createHash, createHmac, timingSafeEqual } from "node:crypto";
import { KvError } from "@kv/interface";
import { requireObject, shown } from "../validate.js";

/** "KVMD", version 1. */
const MAGIC = Uint8Array.of(0x4b, 0x56, 0x4d, 0x44, 1);
const LENGTH_BYTES = 4;
const DIGEST_BYTES = 32;
const HEADER_BYTES = MAGIC.length + 1 + LENGTH_BYTES + DIGEST_BYTES;
/** As the addon: NIXL's metadata of a rank is some KB. */
const MAX_BYTES = 64 << 20;
const PLAIN = 0;
const KEYED = 1;
const MIN_KEY_BYTES = 16;

export interface FrameOptions {
  /** Shared by both sides, at least 16 bytes: the digest is an HMAC then, and a frame without it is refused. */
  readonly key?: Uint8Array;
}

/**
 * Agent metadata for a channel of one's own: mark, kind, length (4 bytes, big endian), SHA-256 or, with a key, HMAC-SHA-256 of mark, kind,
 * length and bytes; then the bytes. `unframeMetadata` undoes it. A vLLM peer wants the bytes as they are. Errors: `KV_AGENT_METADATA_INVALID`.
 */
export function frameMetadata(metadata: Uint8Array, options: FrameOptions = {}): Uint8Array {
  const key = checked(metadata, options);
  if (metadata.byteLength === 0 || metadata.byteLength > MAX_BYTES) {
    throw refused(`${metadata.byteLength} bytes of metadata, not 1 to ${MAX_BYTES}`);
  }
  const frame = new Uint8Array(HEADER_BYTES + metadata.byteLength);
  frame.set(MAGIC);
  frame[MAGIC.length] = key === undefined ? PLAIN : KEYED;
  new DataView(frame.buffer).setUint32(MAGIC.length + 1, metadata.byteLength);
  frame.set(metadata, HEADER_BYTES);
  frame.set(digest(frame, key), HEADER_BYTES - DIGEST_BYTES);
  return frame;
}

/**
 * The metadata of a frame, whole and unchanged, and from a holder of the key where there is one. Takes well below a millisecond.
 * Errors: `KV_AGENT_METADATA_INVALID` with what was expected and what came.
 */
export function unframeMetadata(frame: Uint8Array, options: FrameOptions = {}): Uint8Array {
  const key = checked(frame, options);
  if (frame.byteLength <= HEADER_BYTES || MAGIC.some((byte, index) => frame[index] !== byte)) {
    throw refused(`${frame.byteLength} bytes are no frame of agent metadata, version 1`);
  }
  const length = new DataView(frame.buffer, frame.byteOffset).getUint32(MAGIC.length + 1);
  const found = frame.byteLength - HEADER_BYTES;
  if (length !== found) throw refused(`the frame announces ${length} bytes, and holds ${found}`);
  const kind = frame[MAGIC.length];
  const wanted = key === undefined ? PLAIN : KEYED;
  if (kind !== wanted) {
    throw refused(
      kind === KEYED ? "the frame is signed, and no key is given here" : "the frame is not signed by the key",
      "give both sides the same key, or neither",
    );
  }
  if (!timingSafeEqual(digest(frame, key), frame.subarray(HEADER_BYTES - DIGEST_BYTES, HEADER_BYTES))) {
    const why = key === undefined ? "its SHA-256 is another" : "its signature is another key's";
    throw refused(`the frame of ${length} bytes was changed on its way: ${why}`);
  }
  return new Uint8Array(frame.subarray(HEADER_BYTES));
}

/** The key, where what was given is of the right kind. */
function checked(bytes: Uint8Array, options: FrameOptions): Uint8Array | undefined {
  if (!(bytes instanceof Uint8Array)) throw refused(`metadata is ${shown(bytes)}, not a Uint8Array`);
  requireObject(options, "KV_AGENT_METADATA_INVALID", "the option with a key");
  const { key } = options;
  if (key === undefined || key instanceof Uint8Array) return key;
  throw refused(`the key is a ${typeof key}, not a Uint8Array`);
}

function digest(frame: Uint8Array, key: Uint8Array | undefined): Buffer {
  if (key !== undefined && key.byteLength < MIN_KEY_BYTES) {
    throw refused(`the key has ${key.byteLength} bytes, not at least ${MIN_KEY_BYTES}`);
  }
  const hash = key === undefined ? createHash("sha256") : createHmac("sha256", key);
  return hash
    .update(frame.subarray(0, HEADER_BYTES - DIGEST_BYTES))
    .update(frame.subarray(HEADER_BYTES))
    .digest();
}

function refused(why: string, hint?: string): KvError {
  return new KvError("KV_AGENT_METADATA_INVALID", why, hint === undefined ? {} : { hint });
}
