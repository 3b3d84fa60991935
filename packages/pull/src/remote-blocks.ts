import { parseTransferParams, remoteLeaseOf } from "@kv/connector";
import { type KvCacheConfig, KvError, type KvTransferParams } from "@kv/interface";
import { joinsGroups } from "@kv/plan";
import type { RemoteBlocks } from "./step-metadata.js";

/**
 * Where a request's KV is, from `kv_transfer_params`. Errors: `KV_REQUEST_INVALID`, naming the key and its value.
 */
export function readRemoteBlocks(params: KvTransferParams, config: KvCacheConfig): RemoteBlocks {
  const parsed = parseTransferParams(params);
  if (parsed.kind !== "remote-prefill") {
    throw new KvError("KV_REQUEST_INVALID", "kv_transfer_params do not ask for a remote prefill");
  }
  if (parsed.transferMode !== "pull") {
    throw new KvError(
      "KV_REQUEST_INVALID",
      `kv_transfer_params: transfer_mode is "${parsed.transferMode}", this connector is "pull"`,
      { hint: "use the same connector on prefill and decode workers" },
    );
  }
  // How the peer groups the layers of an MLA model is known after the handshake only.
  const lists = parsed.remoteBlockIds.length;
  if (lists !== config.groups.length && !(lists > 0 && joinsGroups(config.groups.map(({ kind }) => kind)))) {
    throw new KvError(
      "KV_REQUEST_INVALID",
      `kv_transfer_params: remote_block_ids has ${lists} KV cache groups, this engine has ${config.groups.length}`,
    );
  }
  const lease = remoteLeaseOf(params);
  return {
    engineId: parsed.remoteEngineId,
    host: parsed.remoteHost,
    port: parsed.remotePort,
    tpSize: parsed.tpSize,
    dcpSize: parsed.dcpSize,
    ppSize: parsed.ppSize,
    registrationGeneration: parsed.remoteRegistrationGeneration,
    requestId: parsed.remoteRequestId,
    blockIds: parsed.remoteBlockIds,
    ...(parsed.remoteNumTokens === undefined ? {} : { numTokens: parsed.remoteNumTokens }),
    ...(parsed.remoteBlocksExpiryTime === undefined ? {} : { expirySeconds: parsed.remoteBlocksExpiryTime }),
    ...(lease === undefined ? {} : { lease }),
  };
}

/** Whom to tell that parameters which are no good will not be read: the address alone may still be right. */
export function remoteToTell(params: KvTransferParams): RemoteBlocks | undefined {
  if (params.transfer_mode !== undefined && params.transfer_mode !== "pull") return undefined;
  const addressOnly = {
    ...params,
    do_remote_prefill: true,
    do_remote_decode: false,
    remote_block_ids: [],
    remote_num_tokens: null,
    remote_blocks_expiry_time: null,
  };
  try {
    return readRemoteBlocks(addressOnly, { groups: [] as KvCacheConfig["groups"] } as KvCacheConfig);
  } catch {
    return undefined;
  }
}
