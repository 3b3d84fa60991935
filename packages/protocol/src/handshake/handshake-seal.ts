import { createHash, createHmac, timingSafeEqual } from "node:crypto";
import { KvError } from "@kv/interface";
import { isMap, malformed } from "../encoding/map-fields.js";
import { encodeMsgpack } from "../encoding/msgpack.js";
import {
  decodeHandshakePayload,
  encodeHandshakePayload,
  type HandshakePayload,
  type HandshakeRequest,
} from "./handshake.js";

/** The extension's key for the seal: `{version, length, sha256}`, or with a shared key `{version, length, hmac}`; digests in lower-case hex. */
const SEAL_KEY = "seal";
const VERSION = 1;
/** Part of the digest's input, so that the digest is valid for nothing else. */
const DOMAIN = "kv-handshake-1";

/**
 * Adds a seal to an encoded payload: the length of the metadata, and a digest of the payload and of the rank that it is for (a SHA-256, or an
 * HMAC-SHA-256 with `key`). vLLM ignores the seal. An existing seal is replaced. Errors: those of `decodeHandshakePayload`.
 */
export function sealHandshake(payload: Uint8Array, rank: HandshakeRequest, key?: Uint8Array): Uint8Array {
  const decoded = decodeHandshakePayload(payload);
  const { [SEAL_KEY]: _, ...extension } = decoded.extension ?? {};
  const digest = digestOf({ ...decoded, extension }, rank, key).toString("hex");
  const seal = {
    version: VERSION,
    length: decoded.agentMetadataBytes.byteLength,
    ...(key === undefined ? { sha256: digest } : { hmac: digest }),
  };
  return encodeHandshakePayload({ ...decoded, extension: { ...extension, [SEAL_KEY]: seal } });
}

/**
 * Checks a payload's seal. Refused are a payload that was changed on its way or sealed for another rank and, with `keys`, a payload without a
 * valid signature by one of `keys`, which includes every plain vLLM peer. Without `keys` a plain vLLM peer passes, and so does a signature that cannot be
 * checked here. Errors: `KV_HANDSHAKE_UNTRUSTED`, `KV_WIRE_MALFORMED`.
 */
export function checkHandshakeSeal(
  payload: HandshakePayload,
  rank: HandshakeRequest,
  keys?: readonly Uint8Array[],
): void {
  if (payload.extension === undefined) {
    if (keys !== undefined) throw untrusted("it is not signed", SIGN_HINT);
    return;
  }
  const { [SEAL_KEY]: raw, ...extension } = payload.extension;
  const seal = readSeal(raw);
  const found = payload.agentMetadataBytes.byteLength;
  if (seal.length !== found)
    throw untrusted(`the metadata has ${found} bytes, its seal names ${seal.length}`, DAMAGED_HINT);
  if (keys !== undefined && seal.hmac === undefined) throw untrusted("it is not signed", SIGN_HINT);
  // Signed with a key that is not known here: only the transport's own check of the metadata remains.
  if (keys === undefined && seal.hmac !== undefined) return;
  const claimed = Buffer.from((keys === undefined ? seal.sha256 : seal.hmac) ?? "", "hex");
  const isValid = (key: Uint8Array | undefined) => {
    const digest = digestOf({ ...payload, extension }, rank, key);
    return claimed.byteLength === digest.byteLength && timingSafeEqual(claimed, digest);
  };
  if (keys === undefined ? isValid(undefined) : keys.some(isValid)) return;
  if (keys === undefined) throw untrusted("its SHA-256 does not match its content", DAMAGED_HINT);
  throw untrusted("its signature was made with another key or for another payload", SIGN_HINT);
}

const SIGN_HINT =
  "set kv_connector_extra_config.handshake_key_file to the same key on both sides; plain vLLM cannot sign";
const DAMAGED_HINT =
  "the payload was changed on its way: check what stands between the two engines, then send the prompt again";

function untrusted(why: string, hint: string): KvError {
  return new KvError("KV_HANDSHAKE_UNTRUSTED", `the handshake's payload is refused: ${why}`, { hint });
}

interface Seal {
  readonly length: number;
  readonly sha256?: string;
  readonly hmac?: string;
}

function readSeal(value: unknown): Seal {
  const { version, length, sha256, hmac } = isMap(value) ? value : {};
  const isDigest = (text: unknown) => typeof text === "string" && /^[0-9a-f]{64}$/.test(text);
  const [digest] = [sha256, hmac].filter((text) => text !== undefined);
  if (
    version !== VERSION ||
    !Number.isSafeInteger(length) ||
    !isDigest(digest) ||
    (sha256 !== undefined && hmac !== undefined)
  ) {
    throw malformed("handshake reply", SEAL_KEY, `a seal of version ${VERSION}`, value);
  }
  return value as unknown as Seal;
}

function digestOf(
  payload: HandshakePayload,
  { ppRank, tpRank }: HandshakeRequest,
  key: Uint8Array | undefined,
): Buffer {
  const hash = key === undefined ? createHash("sha256") : createHmac("sha256", key);
  const { compatibilityHash, agentMetadataBytes, extension, rest } = payload;
  return hash
    .update(
      encodeMsgpack([DOMAIN, ppRank, tpRank, compatibilityHash, agentMetadataBytes, extension ?? {}, rest]),
    )
    .digest();
}
