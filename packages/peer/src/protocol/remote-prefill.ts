import { type ConnectorModule, KvError, type KvTransferParams, type Random } from "@kv/interface";
import {
  baseRequestId,
  encodeNotification,
  parseTransferParams,
  type RemotePrefillParams,
} from "@kv/protocol";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";

/**
 * Reads P's answer to a prefill request.
 *
 * @throws `KV_REQUEST_INVALID` when the parameters name no remote prefill.
 */
export function readRemotePrefill(params: KvTransferParams): RemotePrefillParams {
  const parsed = parseTransferParams(params);
  if (parsed.kind === "remote-prefill") return parsed;
  throw new KvError(
    "KV_REQUEST_INVALID",
    "the server's kv_transfer_params do not ask for a remote prefill",
  );
}

/** Logical blocks that P keeps for the request, over all KV cache groups. */
export function countRemoteBlocks({ remoteBlockIds }: RemotePrefillParams): number {
  return remoteBlockIds.reduce((sum, ids) => sum + ids.length, 0);
}

/** The connector of a decode engine that pairs with the P of these parameters. */
export function connectorFor({
  transferMode,
}: Pick<RemotePrefillParams, "transferMode">): ConnectorModule {
  return transferMode === "push" ? pushConnector : pullConnector;
}

/**
 * A request id for the decode side. vLLM appends a random suffix to the client's id in each engine;
 * a push P pairs the two requests by what precedes the suffix.
 */
export function decodeRequestId(
  { remoteRequestId }: Pick<RemotePrefillParams, "remoteRequestId">,
  random: Random,
): string {
  return `${baseRequestId(remoteRequestId)}-${random.uuid().slice(0, 8)}`;
}

/**
 * The text of the notification that a single reader sends to P after its READ: P frees the
 * request's blocks.
 */
export function readDoneText(requestId: string): string {
  return new TextDecoder().decode(encodeNotification({ kind: "done", requestId, readers: 1 }));
}
