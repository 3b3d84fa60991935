import { type BlockIds, KvError, type KvTransferParams } from "@kv/interface";
import {
  blocksDigest,
  type PromptPrefix,
  parseTransferParams,
  type RemoteLease,
  type RemotePrefillParams,
  type TransferMode,
} from "@kv/protocol";

/** The side-channel address and the parallel sizes of an engine. Plain data. */
export interface EngineAddress {
  readonly engineId: string;
  readonly host: string;
  readonly port: number;
  readonly tpSize: number;
  readonly dcpSize: number;
  readonly ppSize: number;
  /**
   * How often the engine has registered its KV cache. When it is higher than at the last handshake,
   * D repeats the handshake. @default 0
   */
  readonly registrationGeneration?: number | undefined;
}

/**
 * The key of an engine in tables: id, address and sizes. Requests name all of these themselves, so
 * a request with wrong values gets an entry of its own and cannot disturb requests with the right
 * ones.
 */
export function engineKey({
  engineId,
  host,
  port,
  tpSize,
  dcpSize,
  ppSize,
}: EngineAddress): string {
  return JSON.stringify([engineId, host, port, tpSize, dcpSize, ppSize]);
}

/**
 * The address alone, without the registration of the engine's cache and without what a message has
 * besides.
 */
export function addressOf({
  engineId,
  host,
  port,
  tpSize,
  dcpSize,
  ppSize,
}: EngineAddress): EngineAddress {
  return { engineId, host, port, tpSize, dcpSize, ppSize };
}

/** The engine's name in error messages and logs. */
export function describeEngine({ engineId, host, port }: EngineAddress): string {
  return `engine ${engineId} at ${host}:${port}`;
}

/**
 * A rank of an engine as a table key: its pipeline-parallel and tensor-parallel rank, such as
 * "pp0tp3".
 */
export type RankKey = `pp${number}tp${number}`;

/** The key of a rank; the pipeline-parallel rank is 0 by default. */
export function rankKey({
  ppRank = 0,
  tpRank,
}: {
  ppRank?: number | undefined;
  tpRank: number;
}): RankKey {
  return `pp${ppRank}tp${tpRank}`;
}

/** A request at P, as `kv_transfer_params` name it. */
export interface RemoteRequest extends EngineAddress {
  readonly requestId: string;
  /**
   * `transfer_id`, the front end's name of the prompt; undefined where the parameters have none.
   */
  readonly transferId?: string | undefined;
  /** P's process and the use of its blocks; undefined where P is vLLM. */
  readonly lease?: RemoteLease | undefined;
  readonly traceparent?: string | undefined;
  /**
   * The blocks and tokens that the parameters name, see `blocksDigest`; undefined where they name
   * no blocks.
   */
  readonly blocks?: string | undefined;
  /** The prompt whose KV is fetched; undefined where D's engine does not know its tokens. */
  readonly prompt?: PromptPrefix | undefined;
}

/** A request as heartbeats name it. */
export interface HeartbeatRequest {
  readonly requestId: string;
  /** The request's capability; undefined where P is vLLM. */
  readonly capability?: string | undefined;
}

/**
 * Identifies a request of an engine. One id may come with several capabilities, of which only one
 * is right.
 */
export function heartbeatKey({ requestId, capability = "" }: HeartbeatRequest): string {
  return `${capability} ${requestId}`;
}

/** A request as heartbeats name it. */
export function heartbeatRequest({ requestId, lease }: RemoteRequest): HeartbeatRequest {
  const capability = lease?.capability;
  return capability === undefined ? { requestId } : { requestId, capability };
}

/**
 * The `traceparent` as a member of a step's plain data: none where there is no trace, because plain
 * data has no undefined members.
 */
export function traceMember(traceparent: string | undefined): { readonly traceparent?: string } {
  return traceparent === undefined ? {} : { traceparent };
}

/**
 * Reads the P that computes a request's prompt, and the other values of `kv_transfer_params`. A
 * missing mode is the connector's own mode. `numPromptTokens` bounds P's tokens and the block ids:
 * a block holds at least one token.
 * @throws `KV_REQUEST_INVALID`, naming the key and its value.
 */
export function readRemoteRequest(
  params: KvTransferParams,
  mode: TransferMode,
  numPromptTokens = Number.POSITIVE_INFINITY,
): { readonly remote: RemoteRequest; readonly parsed: RemotePrefillParams } {
  const parsed = parseTransferParams(params, mode);
  if (parsed.kind !== "remote-prefill") {
    throw new KvError("KV_REQUEST_INVALID", "kv_transfer_params do not ask for a remote prefill", {
      hint: "pass the kv_transfer_params of the prefill answer on unchanged",
    });
  }
  if (parsed.transferMode !== mode) {
    throw new KvError(
      "KV_REQUEST_INVALID",
      `kv_transfer_params: transfer_mode is "${parsed.transferMode}", this connector is "${mode}"`,
      { hint: "use the same connector on prefill and decode workers" },
    );
  }
  requireSamePrompt(parsed.remoteNumTokens, numPromptTokens);
  requireBlocks(parsed.remoteBlockIds, numPromptTokens);
  const remote: RemoteRequest = {
    engineId: parsed.remoteEngineId,
    host: parsed.remoteHost,
    port: parsed.remotePort,
    tpSize: parsed.tpSize,
    dcpSize: parsed.dcpSize,
    ppSize: parsed.ppSize,
    registrationGeneration:
      parsed.lease?.registrationGeneration ?? parsed.remoteRegistrationGeneration,
    requestId: parsed.remoteRequestId,
    ...(parsed.transferId === undefined ? {} : { transferId: parsed.transferId }),
    lease: parsed.lease,
    ...traceMember(parsed.lease?.traceparent),
    ...(parsed.remoteBlockIds.length === 0
      ? {}
      : { blocks: blocksDigest(parsed.remoteBlockIds, parsed.remoteNumTokens) }),
  };
  return { remote, parsed };
}

/**
 * P computes no more than the prompt, so a D with fewer tokens has another prompt, such as a
 * placeholder; so has a P with fewer tokens than the D that it reads back from. vLLM reads the last
 * blocks then, and answers from the KV of other tokens.
 * @throws `KV_REQUEST_INVALID` with both numbers.
 */
function requireSamePrompt(remoteNumTokens: number | undefined, numPromptTokens: number): void {
  if (remoteNumTokens === undefined || remoteNumTokens <= numPromptTokens) return;
  throw new KvError(
    "KV_REQUEST_INVALID",
    `kv_transfer_params: remote_num_tokens is ${remoteNumTokens}, and the prompt has ${numPromptTokens} tokens: the KV is that of another prompt`,
    {
      hint: "send a decode worker the prompt of the prefill request, or the prefill answer's prompt_token_ids; send a prefill worker the decode answer's parameters only with a prompt that goes on from its tokens",
      details: { key: "remote_num_tokens", remoteNumTokens, numPromptTokens },
    },
  );
}

/** Block 0 may occur often: vLLM puts its null block where a sliding window has no block. */
const NULL_BLOCK = 0;

/**
 * @throws `KV_REQUEST_INVALID` for more blocks than the prompt has tokens, and for a block that a
 * group names twice.
 */
function requireBlocks(blockIds: BlockIds, numPromptTokens: number): void {
  for (const [group, ids] of blockIds.entries()) {
    if (ids.length > numPromptTokens) {
      throw invalidBlocks(
        group,
        `${ids.length} ids, the prompt has ${numPromptTokens} tokens and needs fewer blocks`,
      );
    }
    const seen = new Set<number>();
    for (const id of ids) {
      if (seen.has(id) && id !== NULL_BLOCK) throw invalidBlocks(group, `block ${id} twice`);
      seen.add(id);
    }
  }
}

function invalidBlocks(group: number, what: string): KvError {
  return new KvError(
    "KV_REQUEST_INVALID",
    `kv_transfer_params: remote_block_ids[${group}] has ${what}`,
    {
      hint: "pass the kv_transfer_params of the prefill answer on unchanged",
      details: { key: "remote_block_ids", group },
    },
  );
}

/**
 * The P to notify that a request's blocks will not be used, after its parameters were refused.
 * Undefined when the parameters contain no valid address.
 */
export function addressToNotify(
  params: KvTransferParams,
  mode: TransferMode,
): RemoteRequest | undefined {
  const { remote_block_ids: blockIds } = params;
  const addressOnly = {
    ...params,
    // As in `keyOf`: where P has named blocks, their reference has no transfer id.
    ...(Array.isArray(blockIds) && blockIds.length > 0 ? { transfer_id: null } : {}),
    do_remote_prefill: true,
    do_remote_decode: false,
    remote_block_ids: [],
    remote_num_tokens: null,
    remote_blocks_expiry_time: null,
  };
  try {
    return readRemoteRequest(addressOnly, mode).remote;
  } catch {
    return undefined;
  }
}
