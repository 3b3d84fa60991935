import {
  KvError,
  type SideChannel,
  type SideChannelReply,
  type WorkerHandshakeMetadata,
} from "@kv/interface";
import {
  type AgentMetadata,
  decodeAgentMetadata,
  decodeHandshakePayload,
  decodeHandshakeRefusal,
  decodeHandshakeReply,
  encodeHandshakePayload,
  encodeHandshakeRequest,
  type HandshakePayload,
} from "@kv/protocol";

/** vLLM's D waits this long for a handshake reply. */
const HANDSHAKE_TIMEOUT_MS = 5000;

/** Where an engine answers handshakes. */
export interface SideChannelAddress {
  /** Host name or IP address; an IPv6 address has no brackets. */
  readonly host: string;
  /** TCP port, 1 to 65535. */
  readonly port: number;
}

export interface HandshakeExchange {
  readonly request: Uint8Array;
  readonly reply: SideChannelReply;
}

export interface RankHandshake {
  readonly payload: HandshakePayload;
  /** The sender's clock in seconds; undefined when the reply has no clock frame. */
  readonly clockSeconds: number | undefined;
}

/**
 * Asks tensor-parallel rank `tpRank` of pipeline stage 0 for its handshake metadata.
 *
 * @throws those of `SideChannel.request`.
 */
export async function exchangeHandshake(
  sideChannel: SideChannel,
  address: SideChannelAddress,
  {
    tpRank = 0,
    timeoutMs = HANDSHAKE_TIMEOUT_MS,
  }: { tpRank?: number; timeoutMs?: number | undefined } = {},
): Promise<HandshakeExchange> {
  const request = encodeHandshakeRequest({ ppRank: 0, tpRank });
  const { host, port } = address;
  const reply = await sideChannel.request({ host, port, frames: [request], timeoutMs });
  return { request, reply };
}

/**
 * Decodes the frames of a reply.
 *
 * @throws `KV_HANDSHAKE_REFUSED`, `KV_WIRE_MALFORMED`, `KV_WIRE_LIMIT_EXCEEDED`.
 */
export function decodeHandshake({ reply }: HandshakeExchange): RankHandshake {
  const refusal = decodeHandshakeRefusal(reply.frames);
  if (refusal !== undefined)
    throw new KvError("KV_HANDSHAKE_REFUSED", `the engine refused: ${refusal}`);
  return decodeHandshakeReply(reply.frames);
}

/**
 * Asks one rank and decodes its hash and its metadata.
 *
 * @throws those of `exchangeHandshake` and `decodeHandshake`, `KV_WIRE_MALFORMED` for the metadata.
 */
export async function readRankMetadata(
  sideChannel: SideChannel,
  address: SideChannelAddress,
  options?: { tpRank?: number; timeoutMs?: number | undefined },
): Promise<{ readonly compatibilityHash: string; readonly metadata: AgentMetadata }> {
  const { payload } = decodeHandshake(await exchangeHandshake(sideChannel, address, options));
  const { compatibilityHash, agentMetadataBytes } = payload;
  return { compatibilityHash, metadata: decodeAgentMetadata(agentMetadataBytes) };
}

/**
 * Replaces the compatibility hash of a rank's handshake metadata. A headless engine does not know
 * the factors of the model that it stands in for, so it announces the hash of the real server.
 * `keepExtension` keeps what only engines of this project announce; without it the peer sees a
 * plain vLLM.
 *
 * @throws `KV_WIRE_MALFORMED`.
 */
export function replaceCompatibilityHash(
  metadata: WorkerHandshakeMetadata,
  compatibilityHash: string,
  { keepExtension }: { keepExtension: boolean },
): WorkerHandshakeMetadata {
  const { agentMetadataBytes, extension } = decodeHandshakePayload(metadata.payload);
  // The extension is a key on the wire: it is absent, not undefined.
  const kept = keepExtension && extension !== undefined ? { extension } : {};
  const payload = encodeHandshakePayload({
    compatibilityHash,
    agentMetadataBytes,
    rest: {},
    ...kept,
  });
  return { ...metadata, payload };
}
