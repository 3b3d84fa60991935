import {
  type ConnectorModule,
  KvError,
  type KvTransferParams,
  type Random,
  type SideChannel,
  type SideChannelReply,
  type WorkerHandshakeMetadata,
} from "@kv/interface";
import {
  type AgentMetadata,
  baseRequestId,
  decodeAgentMetadata,
  decodeHandshakePayload,
  decodeHandshakeRefusal,
  decodeHandshakeReply,
  encodeHandshakePayload,
  encodeHandshakeRequest,
  encodeNotification,
  type HandshakePayload,
  parseTransferParams,
  type RemotePrefillParams,
} from "@kv/protocol";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";

/** As vLLM's D waits for a handshake reply. */
const HANDSHAKE_TIMEOUT_MS = 5000;

/** Where an engine answers handshakes. */
export interface SideChannelAddress {
  /** IPv6 without brackets. */
  readonly host: string;
  readonly port: number;
}

interface HandshakeExchange {
  readonly request: Uint8Array;
  readonly reply: SideChannelReply;
}

interface RankHandshake {
  readonly payload: HandshakePayload;
  readonly clockSeconds: number | undefined;
}

/** @throws those of `SideChannel.request`. */
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

/** @throws `KV_HANDSHAKE_REFUSED`, `KV_WIRE_MALFORMED`, `KV_WIRE_LIMIT_EXCEEDED`. */
export function decodeHandshake({ reply }: HandshakeExchange): RankHandshake {
  const refusal = decodeHandshakeRefusal(reply.frames);
  if (refusal !== undefined)
    throw new KvError("KV_HANDSHAKE_REFUSED", `the engine refused: ${refusal}`);
  return decodeHandshakeReply(reply.frames);
}

/**
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
 * A headless engine announces the real server's hash, because it does not know the model. Without
 * `keepExtension` the peer sees a plain vLLM.
 *
 * @throws `KV_WIRE_MALFORMED`.
 */
export function replaceCompatibilityHash(
  metadata: WorkerHandshakeMetadata,
  compatibilityHash: string,
  { keepExtension }: { keepExtension: boolean },
): WorkerHandshakeMetadata {
  const { agentMetadataBytes, extension } = decodeHandshakePayload(metadata.payload);
  const kept = keepExtension && extension !== undefined ? { extension } : {};
  const payload = encodeHandshakePayload({
    compatibilityHash,
    agentMetadataBytes,
    rest: {},
    ...kept,
  });
  return { ...metadata, payload };
}

/** @throws `KV_REQUEST_INVALID` when the parameters name no remote prefill. */
export function readRemotePrefill(params: KvTransferParams): RemotePrefillParams {
  const parsed = parseTransferParams(params);
  if (parsed.kind === "remote-prefill") return parsed;
  throw new KvError(
    "KV_REQUEST_INVALID",
    "the server's kv_transfer_params do not ask for a remote prefill",
  );
}

export function sideChannelOf({
  remoteHost: host,
  remotePort: port,
}: RemotePrefillParams): SideChannelAddress {
  return { host, port };
}

export function countRemoteBlocks({ remoteBlockIds }: RemotePrefillParams): number {
  return remoteBlockIds.reduce((sum, ids) => sum + ids.length, 0);
}

export function connectorFor({
  transferMode,
}: Pick<RemotePrefillParams, "transferMode">): ConnectorModule {
  return transferMode === "push" ? pushConnector : pullConnector;
}

/** vLLM appends a random suffix to the client's id; a push P pairs requests by the rest. */
export function decodeRequestId(
  { remoteRequestId }: Pick<RemotePrefillParams, "remoteRequestId">,
  random: Random,
): string {
  return `${baseRequestId(remoteRequestId)}-${random.uuid().slice(0, 8)}`;
}

/** Frees P's blocks of a request with a single reader. */
export function readDoneText(requestId: string): string {
  return new TextDecoder().decode(encodeNotification({ kind: "done", requestId, readers: 1 }));
}

/** All ranks keep blocks and must be notified. */
export async function readAllRanks(
  sideChannel: SideChannel,
  remote: RemotePrefillParams,
  rank0: AgentMetadata,
  timeoutMs?: number,
): Promise<AgentMetadata[]> {
  if (remote.remoteEngineId !== rank0.engineId) return [];
  const ranks = [rank0];
  for (let tpRank = 1; tpRank < remote.tpSize; tpRank++) {
    const rank = { tpRank, timeoutMs };
    // The lease's end frees a silent rank's blocks.
    const answer = await readRankMetadata(sideChannel, sideChannelOf(remote), rank).catch(() => {});
    if (answer !== undefined) ranks.push(answer.metadata);
  }
  return ranks;
}
