import { createHash } from "node:crypto";
import { KvError } from "@kv/interface";
import { isMap, malformed } from "../encoding/map-fields.js";
import { encodeMsgpack } from "../encoding/msgpack.js";
import {
  decodeHandshakePayload,
  encodeHandshakePayload,
  type HandshakePayload,
  type HandshakeRequest,
} from "./handshake.js";

/** The extension's key for the seal: `{version, length, sha256}`, the digest in lower-case hex. */
const SEAL_KEY = "seal";
const VERSION = 1;
/** Part of the digest's input, so that the digest is valid for nothing else. */
const DOMAIN = "kv-handshake-1";

/**
 * Adds a seal to an encoded payload: the length of the metadata, and the SHA-256 of the payload and
 * of the rank that it is for. vLLM ignores the seal. An existing seal is replaced.
 *
 * @throws those of `decodeHandshakePayload`.
 */
export function sealHandshake(payload: Uint8Array, rank: HandshakeRequest): Uint8Array {
  const decoded = decodeHandshakePayload(payload);
  const { [SEAL_KEY]: _, ...extension } = decoded.extension ?? {};
  const sha256 = digestOf({ ...decoded, extension }, rank);
  const seal = { version: VERSION, length: decoded.agentMetadataBytes.byteLength, sha256 };
  return encodeHandshakePayload({ ...decoded, extension: { ...extension, [SEAL_KEY]: seal } });
}

/**
 * Checks a payload's seal. Refused is a payload that was damaged on its way or sealed for another
 * rank. A plain vLLM peer, which has no seal, passes. Whether the peer is to be trusted is a matter
 * of the side channel.
 *
 * @throws `KV_HANDSHAKE_UNTRUSTED`, `KV_WIRE_MALFORMED`.
 */
export function checkHandshakeSeal(payload: HandshakePayload, rank: HandshakeRequest): void {
  if (payload.extension === undefined) return;
  const { [SEAL_KEY]: raw, ...extension } = payload.extension;
  const { length, sha256 } = readSeal(raw);
  const found = payload.agentMetadataBytes.byteLength;
  if (length !== found)
    throw untrusted(`the metadata has ${found} bytes, its seal names ${length}`);
  if (sha256 !== digestOf({ ...payload, extension }, rank))
    throw untrusted("its SHA-256 does not match its content");
}

function untrusted(why: string): KvError {
  return new KvError("KV_HANDSHAKE_UNTRUSTED", `the handshake's payload is refused: ${why}`, {
    hint: "the payload was changed on its way: check what stands between the two engines, then send the prompt again",
  });
}

interface Seal {
  readonly length: number;
  readonly sha256: string;
}

function readSeal(value: unknown): Seal {
  const { version, length, sha256 } = isMap(value) ? value : {};
  const isDigest = typeof sha256 === "string" && /^[0-9a-f]{64}$/.test(sha256);
  if (version !== VERSION || !Number.isSafeInteger(length) || !isDigest)
    throw malformed("handshake reply", SEAL_KEY, `a seal of version ${VERSION}`, value);
  return { length: length as number, sha256 };
}

function digestOf(payload: HandshakePayload, { ppRank, tpRank }: HandshakeRequest): string {
  const { compatibilityHash, agentMetadataBytes, extension, rest } = payload;
  return createHash("sha256")
    .update(
      encodeMsgpack([
        DOMAIN,
        ppRank,
        tpRank,
        compatibilityHash,
        agentMetadataBytes,
        extension ?? {},
        rest,
      ]),
    )
    .digest("hex");
}
