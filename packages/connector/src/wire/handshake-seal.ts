import { createHash, createHmac, timingSafeEqual } from "node:crypto";
import { KvError } from "@kv/interface";
import { malformed } from "./fields.js";
import {
  decodeHandshakePayload,
  encodeHandshakePayload,
  type HandshakePayload,
  type HandshakeRequest,
} from "./handshake.js";
import { encodeMsgpack } from "./msgpack.js";

/** Under this key of the extension: `{version, length, sha256}`, or with a key `{version, length, hmac}`; both in lower-case hex. */
const SEAL_KEY = "seal";
const VERSION = 1;
/** Says what the digest is of, so that it is good for nothing else. */
const DOMAIN = "kv-handshake-1";

/**
 * Adds a seal: the length of the metadata, and a digest of the payload and of the rank it is for; an HMAC where there is a key. vLLM
 * ignores it. A seal that was there is replaced.
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
 * Refuses what was damaged on its way, what was meant for another rank, and, with a key, what does not carry its signature: a plain vLLM
 * peer too, which has none. Without a key a plain vLLM peer passes, and so does a signature that cannot be checked here.
 * Errors: `KV_HANDSHAKE_UNTRUSTED`, `KV_WIRE_MALFORMED`.
 */
export function checkHandshakeSeal(
  payload: HandshakePayload,
  rank: HandshakeRequest,
  key?: Uint8Array,
): void {
  if (payload.extension === undefined) {
    if (key !== undefined) throw untrusted("it is not signed", SIGN);
    return;
  }
  const { [SEAL_KEY]: raw, ...extension } = payload.extension;
  const seal = readSeal(raw);
  const found = payload.agentMetadataBytes.byteLength;
  if (seal.length !== found)
    throw untrusted(`the metadata has ${found} bytes, and its seal says ${seal.length}`, DAMAGED);
  if (key !== undefined && seal.hmac === undefined) throw untrusted("it is not signed", SIGN);
  // Signed by a key that is not known here: the transport's own check of the metadata is what is left.
  if (key === undefined && seal.hmac !== undefined) return;
  const told = Buffer.from((key === undefined ? seal.sha256 : seal.hmac) ?? "", "hex");
  const digest = digestOf({ ...payload, extension }, rank, key);
  if (told.byteLength === digest.byteLength && timingSafeEqual(told, digest)) return;
  if (key === undefined) throw untrusted("it is not what its SHA-256 is of", DAMAGED);
  throw untrusted("its signature is of another key, or of another payload", SIGN);
}

const SIGN =
  "set kv_connector_extra_config.handshake_key_file to the same key on both sides; plain vLLM cannot sign";
const DAMAGED = "it was changed on its way: look at what stands between the two, and send the prompt again";

function untrusted(why: string, hint: string): KvError {
  return new KvError("KV_HANDSHAKE_UNTRUSTED", `the handshake's payload is refused: ${why}`, { hint });
}

interface Seal {
  readonly length: number;
  readonly sha256?: string;
  readonly hmac?: string;
}

function readSeal(value: unknown): Seal {
  const isMap =
    typeof value === "object" && value !== null && !Array.isArray(value) && !(value instanceof Uint8Array);
  const { version, length, sha256, hmac } = (isMap ? value : {}) as Record<string, unknown>;
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
