import { createHash } from "node:crypto";
import { KvError } from "@kv/interface";
import { encodeMsgpack, isMap, malformed } from "../encoding/messages.js";
import {
  decodeHandshakePayload,
  encodeHandshakePayload,
  type HandshakePayload,
  type HandshakeRequest,
} from "./handshake.js";

/** `{version, length, sha256}`, in lower-case hex. */
const SEAL_KEY = "seal";
const VERSION = 1;
/** Makes the digest valid for nothing else. */
const DOMAIN = "kv-handshake-1";

/**
 * Adds or replaces a payload's seal, which vLLM ignores: the metadata's length, and a SHA-256 of
 * payload and rank.
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
 * Refuses a payload that was damaged or sealed for another rank; vLLM's, without a seal, pass.
 * Whether to trust the peer is up to the side channel.
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
