import { KvError, type KvTransferParams } from "@kv/interface";
import { parseTransferParams, type RemotePrefillParams, type TransferMode } from "@kv/protocol";
import type { RemoteRequest } from "./step-types.js";

/**
 * Reads the P that computes a request's prompt, and the other values of `kv_transfer_params`. A missing mode is the connector's own
 * mode. Errors: `KV_REQUEST_INVALID`, naming the key and its value.
 */
export function readRemoteRequest(
  params: KvTransferParams,
  mode: TransferMode,
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
  const remote: RemoteRequest = {
    engineId: parsed.remoteEngineId,
    host: parsed.remoteHost,
    port: parsed.remotePort,
    tpSize: parsed.tpSize,
    dcpSize: parsed.dcpSize,
    ppSize: parsed.ppSize,
    registrationGeneration: parsed.remoteRegistrationGeneration,
    requestId: parsed.remoteRequestId,
    lease: parsed.lease,
  };
  return { remote, parsed };
}

/**
 * The P to notify that a request's blocks will not be used, after its parameters were refused. Undefined when the parameters contain no valid
 * address.
 */
export function addressToNotify(params: KvTransferParams, mode: TransferMode): RemoteRequest | undefined {
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
