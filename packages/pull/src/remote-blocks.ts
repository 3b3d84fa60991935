import { readRemoteRequest } from "@kv/connector";
import { type KvCacheConfig, KvError, type KvTransferParams } from "@kv/interface";
import { joinsGroups } from "@kv/plan";
import type { RemoteBlocks } from "./step-metadata.js";

/**
 * Where a request's KV is, from `kv_transfer_params`. Errors: `KV_REQUEST_INVALID`, naming the key and its value.
 */
export function readRemoteBlocks(params: KvTransferParams, config: KvCacheConfig): RemoteBlocks {
  const { remote, parsed } = readRemoteRequest(params, "pull");
  // How the peer groups the layers of an MLA model is known after the handshake only.
  const lists = parsed.remoteBlockIds.length;
  if (lists !== config.groups.length && !(lists > 0 && joinsGroups(config.groups.map(({ kind }) => kind)))) {
    throw new KvError(
      "KV_REQUEST_INVALID",
      `kv_transfer_params: remote_block_ids has ${lists} KV cache groups, this engine has ${config.groups.length}`,
    );
  }
  return {
    ...remote,
    blockIds: parsed.remoteBlockIds,
    ...(parsed.remoteNumTokens === undefined ? {} : { numTokens: parsed.remoteNumTokens }),
    ...(parsed.remoteBlocksExpiryTime === undefined ? {} : { expirySeconds: parsed.remoteBlocksExpiryTime }),
  };
}
