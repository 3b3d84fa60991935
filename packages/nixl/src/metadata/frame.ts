import { createHash, createHmac, timingSafeEqual } from "node:crypto";
import { KvError } from "@kv/interface";
import { formatValue, requireObject } from "../validate.js";

/** "KVMD", version 1. */
const MAGIC = Uint8Array.of(0x4b, 0x56, 0x4d, 0x44, 1);
const LENGTH_BYTES = 4;
const DIGEST_BYTES = 32;
const HEADER_BYTES = MAGIC.length + 1 + LENGTH_BYTES + DIGEST_BYTES;
/** The same limit as in the addon. NIXL's metadata of one rank is a few KB. */
const MAX_BYTES = 64 << 20;
const PLAIN = 0;
const KEYED = 1;
const MIN_KEY_BYTES = 16;

/** How metadata is framed. */
export interface FrameOptions {
  /** A key that both sides share, at least 16 bytes. With it the digest is an HMAC, and unsigned frames are refused. */
  readonly key?: Uint8Array | undefined;
}

/**
 * Wraps agent metadata for a side channel of your own, so that damage is detected. The frame: "KVMD" and version 1, kind, length (4 bytes, big
 * endian), SHA-256 (with a key, HMAC-SHA-256) of all that and the metadata, then the metadata. vLLM peers need the metadata without a frame.
 * Throws `KV_AGENT_METADATA_INVALID`.
 */
export function frameMetadata(metadata: Uint8Array, options: FrameOptions = {}): Uint8Array {
  const key = validKey(metadata, options);
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
 * Returns the metadata of a frame after it checked that the frame is complete, unchanged and, with a key, signed by it. Takes well below a
 * millisecond. Throws `KV_AGENT_METADATA_INVALID` with the expected and the found value.
 */
export function unframeMetadata(frame: Uint8Array, options: FrameOptions = {}): Uint8Array {
  const key = validKey(frame, options);
  if (frame.byteLength <= HEADER_BYTES || MAGIC.some((byte, index) => frame[index] !== byte)) {
    throw refused(`${frame.byteLength} bytes that are not a frame of agent metadata, version 1`);
  }
  const length = new DataView(frame.buffer, frame.byteOffset).getUint32(MAGIC.length + 1);
  const found = frame.byteLength - HEADER_BYTES;
  if (length !== found) throw refused(`the frame announces ${length} bytes, but holds ${found}`);
  const kind = frame[MAGIC.length];
  const wanted = key === undefined ? PLAIN : KEYED;
  if (kind !== wanted) {
    throw refused(
      kind === KEYED ? "the frame is signed, but this side has no key" : "the frame is not signed",
      "give both sides the same key, or neither",
    );
  }
  if (!timingSafeEqual(digest(frame, key), frame.subarray(HEADER_BYTES - DIGEST_BYTES, HEADER_BYTES))) {
    const why = key === undefined ? "its SHA-256 differs" : "it was signed with another key, or changed";
    throw refused(`the frame of ${length} bytes is damaged: ${why}`);
  }
  return new Uint8Array(frame.subarray(HEADER_BYTES));
}

/** Checks the types of the arguments; returns the key. */
function validKey(bytes: Uint8Array, options: FrameOptions): Uint8Array | undefined {
  if (!(bytes instanceof Uint8Array)) throw refused(`metadata is ${formatValue(bytes)}, not a Uint8Array`);
  requireObject(options, "KV_AGENT_METADATA_INVALID", "the options of a frame");
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
