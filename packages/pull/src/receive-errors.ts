import type { RemoteRequest } from "@kv/connector/building-blocks";
import { KvError } from "@kv/interface";
import type { ReceiveOrder } from "./step-metadata.js";

/** The peer has computed another prompt. */
export function promptMismatch({ requestId, remote }: ReceiveOrder): KvError {
  const { engineId, requestId: remoteRequestId, prompt } = remote;
  const what =
    prompt === undefined
      ? "the engine of this request handed its connector no token ids to compare"
      : `its first ${prompt.numTokens} tokens, or what else decides its KV, differ`;
  return new KvError(
    "KV_PROMPT_MISMATCH",
    `request ${requestId} is not the prompt whose KV engine ${engineId} keeps for request ${remoteRequestId}: ${what}; the bytes that were read are not used`,
    {
      hint: "send a decode worker the prompt of the prefill request, and a prefill worker a prompt that goes on from the decode worker's tokens, with the same model, LoRA adapter, cache salt and images",
      details: { engineId, requestId: remoteRequestId, numTokens: prompt?.numTokens },
    },
  );
}

/**
 * P's answer after the READs: it does not hold the blocks, or `answeredBy` is not the process that
 * was read from.
 */
export function blocksNotHeld(
  { engineId, requestId }: RemoteRequest,
  incarnation: string | undefined,
  answeredBy: string,
): KvError {
  return new KvError(
    "KV_LEASE_EXPIRED",
    `engine ${engineId} did not keep the blocks of request ${requestId} until they were read: the bytes that were read are not used`,
    {
      hint: "the lease ended, another reader was done with the request, or the worker was restarted; send the prompt to it again",
      details: { engineId, requestId, incarnation, answeredBy },
    },
  );
}

/**
 * The READ ended `lateMs` after the time until which a P that answers no queries was sure to hold
 * the blocks.
 */
export function leaseEnded({ engineId, requestId }: RemoteRequest, lateMs: number): KvError {
  return new KvError(
    "KV_LEASE_EXPIRED",
    `engine ${engineId} was guaranteed to hold the blocks of request ${requestId} only until ${Math.ceil(lateMs)} ms ago: its READ is not used`,
    {
      hint: "raise kv_lease_duration on both sides, or give decode workers more blocks",
      details: { lateMs },
    },
  );
}
