import { parseTransferParams, type RemoteRequest, remoteLeaseOf } from "@kv/connector";
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
  const known = params.remote_block_ids !== undefined && params.remote_block_ids !== null;
  const parsed = parseTransferParams({
    transfer_mode: "push",
    ...params,
    remote_block_ids: known ? params.remote_block_ids : [],
  });
  if (parsed.kind !== "remote-prefill") {
    throw new KvError("KV_REQUEST_INVALID", "kv_transfer_params do not ask for a remote prefill");
  }
  if (parsed.transferMode !== "push") {
    throw new KvError(
      "KV_REQUEST_INVALID",
      `kv_transfer_params: transfer_mode is "${parsed.transferMode}", this connector is "push"`,
      { hint: "use the same connector on prefill and decode workers" },
    );
  }
  const groups = parsed.remoteBlockIds.length;
  if (groups > 0 && groups !== config.groups.length) {
    throw new KvError(
      "KV_REQUEST_INVALID",
      `kv_transfer_params: remote_block_ids has ${groups} KV cache groups, this engine has ${config.groups.length}`,
    );
  }
  const lease = remoteLeaseOf(params);
  return {
    remote: {
      engineId: parsed.remoteEngineId,
      host: parsed.remoteHost,
      port: parsed.remotePort,
      tpSize: parsed.tpSize,
      dcpSize: parsed.dcpSize,
      ppSize: parsed.ppSize,
      registrationGeneration: parsed.remoteRegistrationGeneration,
      requestId: parsed.remoteRequestId,
      ...(lease === undefined ? {} : { lease }),
    },
    ...(parsed.remoteNumTokens === undefined ? {} : { numTokens: parsed.remoteNumTokens }),
    ...(groups === 0 ? {} : { blockIds: parsed.remoteBlockIds }),
  };
}

/** Whom to tell that parameters which are no good will not be used: the address alone may still be right. */
export function producerToTell(params: KvTransferParams): RemoteRequest | undefined {
  if (params.transfer_mode !== undefined && params.transfer_mode !== "push") return undefined;
  const addressOnly = {
    ...params,
    do_remote_prefill: true,
    do_remote_decode: false,
    remote_block_ids: null,
    remote_num_tokens: null,
    remote_blocks_expiry_time: null,
  };
  try {
    return readRemotePrefill(addressOnly, { groups: [] as KvCacheConfig["groups"] } as KvCacheConfig).remote;
  } catch {
    return undefined;
  }
}
