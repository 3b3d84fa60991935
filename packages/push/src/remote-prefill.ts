import { type RemoteRequest, readRemoteRequest } from "@kv/connector";
import { type BlockIds, type KvCacheConfig, KvError, type KvTransferParams } from "@kv/interface";

/** The producer that computes a request's prompt, and what it told of it. */
export interface RemotePrefill {
  readonly remote: RemoteRequest;
  /** Absent where the two legs go out at once: the producer has answered nothing yet. */
  readonly numTokens?: number;
  readonly blockIds?: BlockIds;
}

/**
 * Who will write a request's KV, from `kv_transfer_params`: the producer's answer, or, where both legs go out at once, the
 * coordinates that the proxy knows beforehand, without blocks. Errors: `KV_REQUEST_INVALID`, naming the key and its value.
 */
export function readRemotePrefill(params: KvTransferParams, config: KvCacheConfig): RemotePrefill {
  const { remote, parsed } = readRemoteRequest(
    { ...params, remote_block_ids: params.remote_block_ids ?? [] },
    "push",
  );
  const groups = parsed.remoteBlockIds.length;
  if (groups > 0 && groups !== config.groups.length) {
    throw new KvError(
      "KV_REQUEST_INVALID",
      `kv_transfer_params: remote_block_ids has ${groups} KV cache groups, this engine has ${config.groups.length}`,
    );
  }
  return {
    remote,
    ...(parsed.remoteNumTokens === undefined ? {} : { numTokens: parsed.remoteNumTokens }),
    ...(groups === 0 ? {} : { blockIds: parsed.remoteBlockIds }),
  };
}
