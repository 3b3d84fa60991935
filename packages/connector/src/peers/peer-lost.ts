import type { KvError } from "@kv/interface";

/** Codes of transfer errors that mean that the peer is gone or its metadata is stale. The peer must then be dropped. */
const PEER_LOST: readonly string[] = [
  "KV_PEER_DISCONNECTED",
  "KV_AGENT_UNKNOWN_REMOTE",
  "KV_TRANSFER_FAILED",
  "KV_TRANSFER_TIMEOUT",
  "KV_NOTIFICATION_FAILED",
];

/** Whether a failed transfer means that the peer must be dropped and opened again. */
export function isPeerLost(error: KvError): boolean {
  return PEER_LOST.includes(error.code);
}
