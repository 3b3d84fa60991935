import { KvError, type KvTransferParams } from "@kv/interface";
import { parseTransferParams, type RemotePrefillParams } from "@kv/protocol";
import type { TransferMode } from "../dual-connector.js";
import type { RemoteRequest } from "./step-types.js";
import { remoteLeaseOf } from "./remote-lease.js";

/**
 * The producer that computes a request's prompt, and whatever else `kv_transfer_params` say. Where they name no mode, it is the connector's
 * own. Errors: `KV_REQUEST_INVALID`, naming the key and its value.
 */
export function readRemoteRequest(
  params: KvTransferParams,
  mode: TransferMode,
): { readonly remote: RemoteRequest; readonly parsed: RemotePrefillParams } {
  const parsed = parseTransferParams({ transfer_mode: mode, ...params });
  if (parsed.kind !== "remote-prefill") {
    throw new KvError("KV_REQUEST_INVALID", "kv_transfer_params do not ask for a remote prefill");
  }
  if (parsed.transferMode !== mode) {
    throw new KvError(
      "KV_REQUEST_INVALID",
      `kv_transfer_params: transfer_mode is "${parsed.transferMode}", this connector is "${mode}"`,
      { hint: "use the same connector on prefill and decode workers" },
    );
  }
  const lease = remoteLeaseOf(params);
  const remote = {
    engineId: parsed.remoteEngineId,
    host: parsed.remoteHost,
    port: parsed.remotePort,
    tpSize: parsed.tpSize,
    dcpSize: parsed.dcpSize,
    ppSize: parsed.ppSize,
    registrationGeneration: parsed.remoteRegistrationGeneration,
    requestId: parsed.remoteRequestId,
    ...(lease === undefined ? {} : { lease }),
  };
  return { remote, parsed };
}

/** Whom to tell that parameters which are no good will not be used: the address alone may still be right. */
export function remoteToTell(params: KvTransferParams, mode: TransferMode): RemoteRequest | undefined {
  const addressOnly = {
    ...params,
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
