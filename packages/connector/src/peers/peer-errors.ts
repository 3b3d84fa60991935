import { KvError } from "@kv/interface";
import { describeEngine, type EngineAddress } from "../requests/remote-request.js";
import type { EngineRequest, OpenEngine } from "./remote-engine.js";

/**
 * Codes of transfer errors that mean that the peer is gone or its metadata is stale. The peer must
 * then be dropped.
 */
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

/** The error for a request whose process is gone. */
export function staleProcess(
  { engineId, requestId, host, port }: EngineRequest,
  role: "prefill" | "decode",
): KvError {
  const another = `another process answers at ${host}:${port}`;
  if (role === "decode") {
    return new KvError(
      "KV_GENERATION_STALE",
      `the process of engine ${engineId} that registered request ${requestId} has gone; ${another}`,
    );
  }
  return new KvError(
    "KV_GENERATION_STALE",
    `request ${requestId} was computed by a process of engine ${engineId} that is gone; ${another}`,
    {
      hint: "send the prompt to a prefill worker again",
      details: { engineId, requestId, host, port },
    },
  );
}

/** The error for parameters whose registration the peer does not have. */
export function unknownRegistration(
  address: EngineAddress,
  engine: Pick<OpenEngine, "registrationGeneration">,
): KvError {
  const [named, found] = [address.registrationGeneration, engine.registrationGeneration];
  return new KvError(
    "KV_GENERATION_STALE",
    `kv_transfer_params name registration ${named} of the KV cache of ${describeEngine(address)}, which has registered it ${found} times`,
    {
      hint: "pass the kv_transfer_params of the prefill answer on unchanged",
      details: { named, found },
    },
  );
}
