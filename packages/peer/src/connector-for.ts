import type { ConnectorModule, Random } from "@kv/interface";
import { baseRequestId, type RemotePrefillParams } from "@kv/protocol";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";

/** The connector that pairs with a prefill server, by what its answer says of itself. */
export function connectorFor({ transferMode }: Pick<RemotePrefillParams, "transferMode">): ConnectorModule {
  return transferMode === "push" ? pushConnector : pullConnector;
}

/** The decode side's name of a request: a pushing server pairs the two by what is left without the suffix that each engine adds. */
export function decodeIdOf(
  { remoteRequestId }: Pick<RemotePrefillParams, "remoteRequestId">,
  random: Random,
) {
  return `${baseRequestId(remoteRequestId)}-${random.uuid().slice(0, 8)}`;
}
