import type { KvTransferParams } from "@kv/interface";
import type { RemoteLease } from "./step-types.js";

/** Our own peers' key of `kv_transfer_params`; anything else under it is as good as absent. */
export function remoteLeaseOf(params: KvTransferParams): RemoteLease | undefined {
  const { kv_peer: given } = params;
  if (typeof given !== "object" || given === null) return undefined;
  const { incarnation, generation } = given as Record<string, unknown>;
  if (typeof incarnation !== "string" || incarnation === "" || incarnation.length > 255) return undefined;
  if (typeof generation !== "number" || !Number.isSafeInteger(generation)) return undefined;
  return { incarnation, generation };
}
